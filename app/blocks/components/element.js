function element(tag, kind, text) {
  const one = document.createElement(tag);
  if (kind) one.className = kind;
  if (text !== undefined) one.textContent = text;
  return one;
}
