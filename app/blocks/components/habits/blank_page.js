// A part that redraws itself and was asked to by the page before takes the page that came after off the screen: Streamlit
// clears what belongs to another page than the one that the answer is of. The page is asked for once more then, as by its key.
export default function () {
  const [PATIENCE_MS, TRIES] = [200, 2]; // between two looks at an empty page; until it has been there again
  const DRAWN = "h1, .amp-card, [data-testid=stAlert]";
  let [tries, seen, timer] = [0, false, 0];
  const look = () => {
    timer = 0;
    const app = document.querySelector("[data-testid=stApp]");
    if (app?.querySelector(`[data-testid=stMain] :is(${DRAWN})`)) [tries, seen] = [0, true];
    else if (seen && tries < TRIES && app?.dataset.testScriptState === "notRunning") {
      tries += 1;
      for (const type of ["keydown", "keypress", "keyup"])
        document.dispatchEvent(new KeyboardEvent(type, { key: "r", code: "KeyR", keyCode: 82, which: 82, bubbles: true }));
    }
  };
  const changed = () => (timer ||= setTimeout(look, PATIENCE_MS));
  const observer = new MutationObserver(changed);
  observer.observe(document.body, {
    childList: true,
    subtree: true,
    attributeFilter: ["data-test-script-state"],
  });
  changed();
  return () => {
    observer.disconnect();
    clearTimeout(timer);
  };
}
