// Streamlit's select boxes keep the keyboard after a choice, and the page's own keys would go into them.
export default function () {
  const release = () => setTimeout(() => document.activeElement?.blur?.(), 0);
  const clicked = (event) => event.target.closest?.("[role=option]") && release();
  const entered = (event) =>
    event.key === "Enter" && event.target.closest?.("[role=combobox][aria-expanded=false]") && release();
  document.addEventListener("click", clicked, true);
  document.addEventListener("keyup", entered, true);
  return () => {
    document.removeEventListener("click", clicked, true);
    document.removeEventListener("keyup", entered, true);
  };
}
