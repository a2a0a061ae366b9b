// The pointer on the track and on the strip above it: the wheel zooms, dragging pans, a click chooses.
const STILL = 4; // pixels that a click may move

function pointAt(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left - GUTTER, event.clientY - box.top];
}

function watchTrack(track, canvas) {
  let drag = null;
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!track.step) return;
      event.preventDefault();
      const across = event.shiftKey ? event.deltaY : event.deltaX;
      if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) track.view.pan(across / track.view.scale);
      else track.view.zoom(1.0018 ** -event.deltaY, pointAt(event, canvas)[0]);
      track.hover(...pointAt(event, canvas));
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || !track.step) return;
    const [x] = pointAt(event, canvas);
    drag = { x, from: track.view.from, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!track.step) return;
    const [x, y] = pointAt(event, canvas);
    if (!drag) return track.hover(x, y);
    drag.moved ||= Math.abs(x - drag.x) > STILL;
    if (!drag.moved) return;
    track.hover(null);
    canvas.style.cursor = "grabbing";
    track.view.set(drag.from - (x - drag.x) / track.view.scale, drag.from - (x - drag.x) / track.view.scale + track.view.to - track.view.from);
    track.draw();
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.style.cursor = "";
    const clicked = drag && !drag.moved;
    drag = null;
    const target = clicked && track.target(...pointAt(event, canvas));
    if (target) track.choose(target.at);
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => track.hover(null));
  canvas.addEventListener("dblclick", (event) => {
    const span = track.target(...pointAt(event, canvas))?.span;
    if (!span) return;
    track.view.set(span[0], span[1] + 1);
    track.draw();
  });
}

// The brush over the whole step: its edges widen it, its middle moves it, beside it a new one is drawn.
function watchStrip(track, strip) {
  let drag = null;
  const opAt = (event) => {
    const [x] = pointAt(event, strip);
    return (x / track.view.width) * track.view.count;
  };
  strip.addEventListener("pointerdown", (event) => {
    if (event.button || !track.step) return;
    const { view } = track;
    const at = opAt(event);
    const near = (5 / view.width) * view.count;
    const edge = [view.from, view.to].findIndex((each) => Math.abs(each - at) < near);
    if (edge >= 0) drag = { fixed: edge ? view.from : view.to };
    else if (at > view.from && at < view.to && view.to - view.from < view.count) drag = { held: at - view.from };
    else drag = { fixed: at };
    strip.setPointerCapture(event.pointerId);
  });
  strip.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const { view } = track;
    const at = opAt(event);
    if ("held" in drag) view.set(at - drag.held, at - drag.held + view.to - view.from);
    else view.set(Math.min(at, drag.fixed), Math.max(at, drag.fixed));
    track.draw();
  });
  for (const end of ["pointerup", "pointercancel"]) strip.addEventListener(end, () => (drag = null));
  strip.addEventListener("dblclick", () => {
    track.view.whole();
    track.draw();
  });
}
