// Tells the track where the page's cursor is.
export default function ({ data }) {
  const channel = (window.ampscopeReplay ??= Object.assign(new EventTarget(), { cursor: null }));
  channel.cursor = data;
  channel.dispatchEvent(new Event("cursor"));
}
