// Which part of a step is on screen: ops against pixels.
const FEWEST = 6; // ops across the whole width

class View {
  constructor(count) {
    this.count = count;
    this.width = 1;
    this.whole();
  }

  get scale() {
    return this.width / (this.to - this.from);
  }

  x(op) {
    return (op - this.from) * this.scale;
  }

  op(x) {
    return this.from + x / this.scale;
  }

  // The ops under one pixel at `x`, from the first to the last; null outside the step.
  under(x) {
    const first = Math.floor(this.op(Math.floor(x)));
    const last = Math.max(first, Math.ceil(this.op(Math.floor(x) + 1)) - 1);
    if (last < 0 || first >= this.count) return null;
    return [Math.max(first, 0), Math.min(last, this.count - 1)];
  }

  whole() {
    this.from = 0;
    this.to = Math.max(this.count, 1);
  }

  set(from, to) {
    const most = Math.max(this.count, 1);
    const span = Math.min(Math.max(to - from, Math.min(FEWEST, most)), most);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(span === to - from ? from : middle - span / 2, 0), most - span);
    this.to = this.from + span;
  }

  // By `factor` closer, with what is at `x` staying there.
  zoom(factor, x = this.width / 2) {
    const most = Math.max(this.count, 1);
    const span = Math.min(Math.max((this.to - this.from) / factor, Math.min(FEWEST, most)), most);
    const from = this.op(x) - (x / this.width) * span;
    this.set(from, from + span);
  }

  pan(ops) {
    this.set(this.from + ops, this.to + ops);
  }

  // Brings an op on screen, in the middle where it was not.
  show(at) {
    if (at >= this.from && at + 1 <= this.to) return;
    this.pan(at + 0.5 - (this.from + this.to) / 2);
  }
}
