// While a page opens, Streamlit loads the pieces it is made of one after the other, and what it has moves with each. It is
// shown when they are there: when nothing stands in for another any more, and the server is through or takes its time.
// It is told where its server is, which it would otherwise ask for below the page's own path, in vain.
{
  const pages = PAGES;
  const parts = location.pathname.replace(/\/+$/, "").split("/");
  if (pages.includes(parts.at(-1))) parts.pop();
  window.__streamlit ??= { BACKEND_BASE_URL: `${location.origin}${parts.join("/")}/` };
}
{
  const [PATIENCE_MS, PIECES_MS, LONGEST_MS] = [400, 4000, 10000]; // from the heading on; for its pieces; in all
  const FIGURES = "[class*=st-key-figure-] *, [class*=st-key-table-] *"; // room is kept for these, in windows of any width
  const LATER = innerWidth > 1000 ? `.st-key-amp-remedy *, ${FIGURES}` : FIGURES; // and for code that does not wrap
  const root = document.documentElement;
  const begun = performance.now();
  let titled = 0;
  const look = (now) => {
    const main = document.querySelector("[data-testid=stMain]");
    if (!titled && main?.querySelector("h1, .amp-card")) titled = now;
    const through = document.querySelector("[data-testid=stApp][data-test-script-state=notRunning]") || now - titled > PATIENCE_MS;
    const there = titled && through && !main.querySelector(`[data-testid=stSkeleton]:not(${LATER})`);
    const late = titled ? now - titled > PIECES_MS : now - begun > LONGEST_MS;
    if (there || late) delete root.dataset.opening;
    else requestAnimationFrame(look);
  };
  root.dataset.opening = "";
  requestAnimationFrame(look);
}
