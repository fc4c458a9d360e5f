"use strict";
// What the page can do beyond being looked at: values under the pointer, a closer look at some steps, series left out.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const SIZE = 1000;
  const domains = {}; // what is looked at, by what charts are over

  // Numbers for people, as the page itself writes them.
  const digits = (value, count) => Number(value.toPrecision(count)).toString();
  const scaled = (value, base, units) => {
    let place = 0;
    while (Math.abs(value) >= base && place < units.length - 1) {
      value /= base;
      place += 1;
    }
    return [value, units[place]];
  };
  function shown(value, unit) {
    if (value === 0) {
      return "0";
    }
    if (unit === "bytes") {
      const [part, name] = scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
      return `${digits(part, 4)} ${name}`;
    }
    if (unit === "seconds") {
      return value < 1 ? `${digits(value * 1000, 4)} ms` : `${digits(value, 4)} s`;
    }
    if (unit === "percent") {
      return `${digits(value * 100, 3)} %`;
    }
    if (unit === "count" && Math.abs(value) >= 1000) {
      const [part, name] = scaled(value, 1000, ["", "k", "M", "G", "T"]);
      return `${digits(part, 4)}${name}`;
    }
    return digits(value, 5);
  }

  // Scales, as figures.py has them.
  const plain = (chart, value) => (chart.log ? Math.log10(value) : value);
  function part(chart, value) {
    if (chart.log && value <= 0) {
      return -1;
    }
    return (plain(chart, value) - plain(chart, chart.low)) / (plain(chart, chart.high) - plain(chart, chart.low));
  }
  function ticks(low, high, most, whole) {
    const least = (high - low) / Math.max(1, most - 1);
    const base = 10 ** Math.floor(Math.log10(least));
    let step = base * ([1, 2, 2.5, 5].find((each) => each * base >= least * (1 - 1e-9)) || 10);
    step = whole ? Math.max(1, Math.round(step)) : step;
    const found = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) {
      found.push(number * step);
    }
    return found;
  }

  function decades(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
      found.push(...[1, 2, 5].map((factor) => factor * 10 ** power));
    }
    const inside = found.filter((value) => value >= low && value <= high);
    const powers = inside.filter((value) => Number.isInteger(Math.log10(value)));
    return powers.length >= 3 ? powers : inside;
  }

  // The index of the value of ascending xs that is nearest to x.
  function nearest(xs, x) {
    let low = 0;
    let high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  }

  function make(name, classes, text) {
    const made = document.createElement(name);
    made.className = classes;
    if (text !== undefined) {
      made.textContent = text;
    }
    return made;
  }

  class View {
    constructor(chart) {
      this.chart = Object.assign(chart, { whole: [chart.low, chart.high] });
      domains[chart.over] = chart.domain;
      this.hidden = new Set();
      this.figure = document.getElementById(chart.id);
      this.picture = this.figure.querySelector(".picture");
      this.svg = this.picture.querySelector("svg");
      this.cursor = this.picture.appendChild(make("div", "cursor"));
      this.chosen = this.picture.appendChild(make("div", "chosen"));
      this.tip = this.picture.appendChild(make("div", "tip"));
      this.cursor.hidden = this.chosen.hidden = this.tip.hidden = true;
      this.began = null;
      this.back = this.figure.appendChild(make("button", "whole", "all steps"));
      this.back.type = "button";
      this.back.hidden = true;
      this.back.addEventListener("click", () => zoom(chart.over, chart.domain));
      for (const button of this.figure.querySelectorAll(".legend button")) {
        button.addEventListener("click", () => this.toggle(button));
      }
      this.picture.addEventListener("pointermove", (event) => this.moved(event));
      this.picture.addEventListener("pointerleave", () => this.leave());
      this.picture.addEventListener("pointerdown", (event) => this.pressed(event));
      this.picture.addEventListener("pointerup", (event) => this.released(event));
      this.picture.addEventListener("pointercancel", () => this.leave());
      this.picture.addEventListener("dblclick", () => zoom(chart.over, chart.domain));
    }

    get domain() {
      return domains[this.chart.over];
    }

    across(x) {
      return (x - this.domain[0]) / (this.domain[1] - this.domain[0]);
    }

    get closer() {
      return this.domain !== this.chart.domain;
    }

    get near() {
      return views.filter((view) => view.chart.over === this.chart.over);
    }

    // A smoothed line and the faint one behind it are one.
    toggle(button) {
      const number = Number(button.dataset.series);
      const behind = this.chart.series[number - 1];
      const numbers = behind && behind.style === "faint" ? [number, number - 1] : [number];
      const hide = !this.hidden.has(number);
      for (const each of numbers) {
        this.hidden[hide ? "add" : "delete"](each);
        for (const path of this.svg.querySelectorAll(`[data-series="${each}"]`)) {
          path.style.display = hide ? "none" : "";
        }
      }
      button.setAttribute("aria-pressed", String(!hide));
      if (this.chart.kind !== "lines") {
        this.draw();
      }
    }

    step(event) {
      const box = this.picture.getBoundingClientRect();
      const at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return this.domain[0] + at * (this.domain[1] - this.domain[0]);
    }

    moved(event) {
      const step = this.step(event);
      const xs = this.chart.series.reduce((most, each) => (each.x.length > most.length ? each.x : most), []);
      const near = xs.length ? xs[this.place(xs, step)] : Math.round(step);
      for (const view of this.near) {
        view.point(near, view === this);
      }
      if (this.began !== null) {
        const [low, high] = [this.began, step].sort((one, two) => one - two).map((x) => this.across(x));
        this.chosen.hidden = false;
        this.chosen.style.left = `${100 * low}%`;
        this.chosen.style.width = `${100 * (high - low)}%`;
      }
    }

    // Where the value lies that is shown for x: the nearest one, and of levels the one that holds.
    place(xs, x) {
      const place = nearest(xs, x);
      return this.chart.kind === "levels" && place > 0 && xs[place] > x ? place - 1 : place;
    }

    moment(x) {
      return this.chart.over === "step" ? `step ${x}` : `after ${shown(x, "seconds")}`;
    }

    point(step, here) {
      const at = this.across(step);
      this.cursor.hidden = at < 0 || at > 1;
      this.cursor.style.left = `${100 * at}%`;
      this.tip.hidden = !here || this.cursor.hidden;
      if (!this.tip.hidden) {
        this.tip.replaceChildren(make("b", "", this.moment(step)), ...this.rows(step));
        this.tip.style.left = at < 0.5 ? `calc(${100 * at}% + 0.6rem)` : "";
        this.tip.style.right = at < 0.5 ? "" : `calc(${100 * (1 - at)}% + 0.6rem)`;
      }
    }

    rows(step) {
      const found = [];
      let total = 0;
      this.chart.series.forEach((series, number) => {
        if (this.hidden.has(number) || !series.x.length) {
          return;
        }
        const place = this.place(series.x, step);
        const away = series.x[place] === step ? "" : ` (${this.moment(series.x[place])})`;
        total += series.y[place];
        const row = make("div", "");
        row.append(
          make("i", `swatch ${series.style} c${series.color}`),
          make("span", "", series.name + away),
          make("span", "", shown(series.y[place], this.chart.unit)),
        );
        found.push(row);
      });
      if (this.chart.kind !== "lines") {
        found.reverse(); // as they lie on each other
        const row = make("div", "");
        row.append(make("span", "", "together"), make("span", "", shown(total, this.chart.unit)));
        found.push(row);
      }
      return found;
    }

    leave() {
      this.began = null;
      this.chosen.hidden = true;
      for (const view of this.near) {
        view.cursor.hidden = view.tip.hidden = true;
      }
    }

    pressed(event) {
      if (event.pointerType === "mouse" && event.button === 0) {
        this.began = this.step(event);
        event.preventDefault();
      }
    }

    released(event) {
      if (this.began === null) {
        return;
      }
      const ends = [this.began, this.step(event)].sort((one, two) => one - two);
      this.began = null;
      this.chosen.hidden = true;
      const least = Math.max(0.02 * (this.domain[1] - this.domain[0]), this.chart.over === "step" ? 1 : 0);
      if (ends[1] - ends[0] > least) {
        zoom(this.chart.over, ends);
      }
    }

    // Draw what is looked at, lines on a scale of their values there.
    draw() {
      const { chart, domain } = this;
      const inside = (x) => x >= domain[0] && x <= domain[1];
      [chart.low, chart.high] = chart.whole;
      if (this.closer && chart.kind === "lines" && chart.low !== 0) {
        const values = chart.series.flatMap((each) => each.y.filter((_, place) => inside(each.x[place])));
        if (values.length) {
          const [low, high] = [Math.min(...values), Math.max(...values)];
          const air = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
          [chart.low, chart.high] = chart.log ? [low / 1.15, high * 1.15] : [low - air, high + air];
        }
      }
      if (chart.kind === "lines") {
        this.lines();
      } else {
        this.areas();
      }
      this.scales();
    }

    // Places in the picture.
    left(x) {
      return (SIZE * this.across(x)).toFixed(1);
    }

    // What lies outside of a closer look is cut off by the picture, else it stays at its edge.
    top(value) {
      const at = part(this.chart, value);
      return (SIZE * (1 - (this.closer ? at : Math.min(1, Math.max(0, at))))).toFixed(1);
    }

    // Where bars begin, and the last one ends, as draw.py has them.
    edges(xs) {
      const [low, high] = this.chart.domain;
      if (this.chart.kind === "levels" || xs.length === 1) {
        return [xs.length === 1 && this.chart.kind !== "levels" ? low : xs[0], ...xs.slice(1), high];
      }
      const inner = xs.slice(1).map((x, place) => (x + xs[place]) / 2);
      const last = inner[inner.length - 1];
      return [Math.max(low, 2 * xs[0] - inner[0]), ...inner, Math.min(high, 2 * xs[xs.length - 1] - last)];
    }

    paths(number) {
      return this.svg.querySelectorAll(`path[data-series="${number}"]`);
    }

    lines() {
      this.chart.series.forEach((series, number) => {
        const at = series.x.map((x, place) => `${this.left(x)} ${this.top(series.y[place])}`);
        const broken = (place) => series.breaks.some((x) => x > series.x[place - 1] && x < series.x[place]);
        for (const path of this.paths(number)) {
          if (path.classList.contains("line")) {
            path.setAttribute("d", at.map((point, place) => `${place && !broken(place) ? "L" : "M"}${point}`).join(""));
          } else if (path.classList.contains("dot")) {
            path.setAttribute("d", at.map((point) => `M${point}h0`).join(""));
          } else {
            path.setAttribute("d", series.breaks.map((x) => `M${this.left(x)} ${SIZE}V${0.94 * SIZE}`).join(""));
          }
        }
      });
    }

    areas() {
      const xs = this.chart.series[0].x;
      const edges = this.edges(xs).map((x) => this.left(x));
      let below = xs.map(() => 0);
      this.chart.series.forEach((series, number) => {
        if (this.hidden.has(number)) {
          return;
        }
        const above = below.map((base, place) => base + series.y[place]);
        const forth = above.map((y, place) => `V${this.top(y)}H${edges[place + 1]}`).join("");
        const back = below.map((y, place) => `V${this.top(y)}H${edges[place]}`).reverse().join("");
        for (const path of this.paths(number)) {
          path.setAttribute("d", `M${edges[0]} ${this.top(below[0])}${forth}${back}Z`);
        }
        below = above;
      });
    }

    // Ticks of the steps, and of values whose scale has changed: these are plain numbers, the others begin at 0.
    scales() {
      const { chart, domain } = this;
      const label = (tick, side, at, unit) => {
        const made = make("span", "", shown(tick, unit));
        made.style[side] = `${100 * at}%`;
        return made;
      };
      const unit = chart.over === "step" ? "count" : "seconds";
      const moments = ticks(domain[0], domain[1], 7, chart.over === "step");
      this.figure.querySelector(".xs").replaceChildren(...moments.map((tick) => label(tick, "left", this.across(tick), unit)));
      if (chart.kind === "lines" && chart.whole[0] !== 0) {
        const values = chart.log ? decades(chart.low, chart.high) : ticks(chart.low, chart.high, 5, false);
        this.figure.querySelector(".ys").replaceChildren(...values.map((tick) => label(tick, "bottom", part(chart, tick), "plain")));
        const grid = values.map((tick) => `M0 ${(SIZE * (1 - part(chart, tick))).toFixed(1)}H${SIZE}`);
        this.svg.querySelector(".grid").setAttribute("d", grid.join(""));
      }
      this.back.hidden = !this.closer;
      this.figure.classList.toggle("closer", this.closer);
    }
  }

  function zoom(over, ends) {
    domains[over] = ends;
    for (const view of views.filter((each) => each.chart.over === over)) {
      view.leave();
      view.draw();
    }
  }

  const views = charts.map((chart) => new View(chart));
})();
