// In a narrow window the side bar lies over the page: it folds once a page was chosen in it.
export default function () {
  const fold = (event) => {
    if (window.innerWidth <= 768 && event.target.closest?.("[data-testid=stSidebar] a")) {
      document.querySelector("[data-testid=stSidebarCollapseButton] button")?.click();
    }
  };
  document.addEventListener("click", fold);
  return () => document.removeEventListener("click", fold);
}
