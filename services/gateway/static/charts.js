// Time series with uPlot: colours follow the theme, sizes follow the window.

const MAX_POINTS = 3600;
const charts = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Series {
  // lines: [{label, colour: "--variable", dash, step, value: (v) => text}]
  constructor(id, lines, range) {
    this.box = document.getElementById(id);
    this.lines = lines;
    this.range = range;
    this.data = [[], ...lines.map(() => [])];
    this.plot = null;
    this.box.setAttribute("role", "img");
    charts.push(this);
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  reset(times, columns) {
    this.data = [times, ...columns];
    this.draw();
  }

  push(time, values) {
    if (this.data[0].length && time <= this.data[0].at(-1)) return;
    this.data[0].push(time);
    values.forEach((value, index) => this.data[index + 1].push(value));
    if (this.data[0].length > MAX_POINTS) this.data.forEach((column) => column.shift());
    this.draw();
  }

  describe(text) {
    this.box.setAttribute("aria-label", text);
  }

  restyle() {
    this.plot?.destroy();
    this.plot = null;
    this.draw();
  }

  resize() {
    if (this.plot && this.box.clientWidth) this.plot.setSize(this.size());
    else this.draw();
  }

  size() {
    // The legend comes below and may need a second line: the box grows then, the picture does not.
    const height = parseFloat(getComputedStyle(this.box).minHeight) - 28;
    return { width: this.box.clientWidth, height };
  }

  draw() {
    if (!this.box.clientWidth || !this.data[0].length) return;
    if (this.plot) this.plot.setData(this.data);
    else this.plot = new uPlot(this.options(), this.data, this.box);
  }

  options() {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "12px system-ui" };
    return {
      ...this.size(),
      cursor: { points: { size: 6 } },
      scales: { y: { range: this.range } },
      axes: [{ ...axis, space: 96 }, { ...axis, size: 52 }],
      series: [
        { label: "time" },
        ...this.lines.map((line) => ({
          label: line.label,
          stroke: colour(line.colour),
          width: 2,
          dash: line.dash,
          spanGaps: true,
          points: { show: line.step === true },
          paths: line.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
          value: (_, value) => (value === null || value === undefined ? "–" : line.value(value)),
        })),
      ],
    };
  }
}

export function restyleCharts() {
  charts.forEach((chart) => chart.restyle());
}
