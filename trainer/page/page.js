"use strict";
// What the page can do beyond being looked at: values under the pointer, a closer look at some steps, series left out.
(() => {
  const { domain: whole, charts } = JSON.parse(document.getElementById("data").textContent);
  const SIZE = 1000;
  let domain = whole;

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
    if (value <= chart.low) {
      return 0;
    }
    return Math.min(1, (plain(chart, value) - plain(chart, chart.low)) / (plain(chart, chart.high) - plain(chart, chart.low)));
  }
  const across = (step) => (step - domain[0]) / (domain[1] - domain[0]);
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
      this.back.addEventListener("click", () => zoom(whole));
      for (const button of this.figure.querySelectorAll(".legend button")) {
        button.addEventListener("click", () => this.toggle(button));
      }
      this.picture.addEventListener("pointermove", (event) => this.moved(event));
      this.picture.addEventListener("pointerleave", () => this.left());
      this.picture.addEventListener("pointerdown", (event) => this.pressed(event));
      this.picture.addEventListener("pointerup", (event) => this.released(event));
      this.picture.addEventListener("pointercancel", () => this.left());
      this.picture.addEventListener("dblclick", () => zoom(whole));
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
      if (this.chart.kind === "stack") {
        this.draw();
      }
    }

    step(event) {
      const box = this.picture.getBoundingClientRect();
      const at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return domain[0] + at * (domain[1] - domain[0]);
    }

    moved(event) {
      const step = this.step(event);
      const xs = this.chart.series.reduce((most, each) => (each.x.length > most.length ? each.x : most), []);
      const near = xs.length ? xs[nearest(xs, step)] : Math.round(step);
      for (const view of views) {
        view.point(near, view === this);
      }
      if (this.began !== null) {
        const [low, high] = [this.began, step].sort((one, two) => one - two).map(across);
        this.chosen.hidden = false;
        this.chosen.style.left = `${100 * low}%`;
        this.chosen.style.width = `${100 * (high - low)}%`;
      }
    }

    point(step, here) {
      const at = across(step);
      this.cursor.hidden = at < 0 || at > 1;
      this.cursor.style.left = `${100 * at}%`;
      this.tip.hidden = !here || this.cursor.hidden;
      if (!this.tip.hidden) {
        this.tip.replaceChildren(make("b", "", `step ${step}`), ...this.rows(step));
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
        const place = nearest(series.x, step);
        const away = series.x[place] === step ? "" : ` (step ${series.x[place]})`;
        total += series.y[place];
        const row = make("div", "");
        row.append(
          make("i", `swatch ${series.style} c${series.color}`),
          make("span", "", series.name + away),
          make("span", "", shown(series.y[place], this.chart.unit)),
        );
        found.push(row);
      });
      if (this.chart.kind === "stack") {
        found.reverse(); // as they lie on each other
        const row = make("div", "");
        row.append(make("span", "", "together"), make("span", "", shown(total, this.chart.unit)));
        found.push(row);
      }
      return found;
    }

    left() {
      this.began = null;
      this.chosen.hidden = true;
      for (const view of views) {
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
      if (ends[1] - ends[0] > 0.02 * (domain[1] - domain[0]) && ends[1] - ends[0] >= 1) {
        zoom(ends);
      }
    }

    // Draw the steps of `domain`, lines on a scale of their values there.
    draw() {
      const { chart } = this;
      const inside = (x) => x >= domain[0] && x <= domain[1];
      [chart.low, chart.high] = chart.whole;
      if (domain !== whole && chart.kind === "lines" && chart.low !== 0) {
        const values = chart.series.flatMap((each) => each.y.filter((_, place) => inside(each.x[place])));
        if (values.length) {
          const [low, high] = [Math.min(...values), Math.max(...values)];
          const air = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
          [chart.low, chart.high] = chart.log ? [low / 1.15, high * 1.15] : [low - air, high + air];
        }
      }
      if (chart.kind === "stack") {
        this.areas();
      } else {
        this.lines();
      }
      this.scales();
    }

    paths(number) {
      return this.svg.querySelectorAll(`path[data-series="${number}"]`);
    }

    lines() {
      this.chart.series.forEach((series, number) => {
        const at = series.x.map((x, place) => `${(SIZE * across(x)).toFixed(1)} ${(SIZE * (1 - part(this.chart, series.y[place]))).toFixed(1)}`);
        const broken = (place) => series.breaks.some((x) => x > series.x[place - 1] && x < series.x[place]);
        for (const path of this.paths(number)) {
          if (path.classList.contains("line")) {
            path.setAttribute("d", at.map((point, place) => `${place && !broken(place) ? "L" : "M"}${point}`).join(""));
          } else if (path.classList.contains("dot")) {
            path.setAttribute("d", at.map((point) => `M${point}h0`).join(""));
          } else {
            path.setAttribute("d", series.breaks.map((x) => `M${(SIZE * across(x)).toFixed(1)} ${SIZE}V${0.94 * SIZE}`).join(""));
          }
        }
      });
    }

    areas() {
      const { x: xs } = this.chart.series[0];
      const middles = xs.slice(1).map((x, place) => (x + xs[place]) / 2);
      const half = xs.length > 1 ? [(xs[1] - xs[0]) / 2, (xs[xs.length - 1] - xs[xs.length - 2]) / 2] : [SIZE, SIZE];
      const first = Math.max(whole[0], xs[0] - half[0]);
      const last = Math.min(whole[1], xs[xs.length - 1] + half[1]);
      const edges = [first, ...middles, last].map((x) => (SIZE * across(x)).toFixed(1));
      const height = (value) => (SIZE * (1 - part(this.chart, value))).toFixed(1);
      let below = xs.map(() => 0);
      this.chart.series.forEach((series, number) => {
        if (this.hidden.has(number)) {
          return;
        }
        const above = below.map((base, place) => base + series.y[place]);
        const forth = above.map((y, place) => `V${height(y)}H${edges[place + 1]}`).join("");
        const back = below.map((y, place) => `V${height(y)}H${edges[place]}`).reverse().join("");
        for (const path of this.paths(number)) {
          path.setAttribute("d", `M${edges[0]} ${height(below[0])}${forth}${back}Z`);
        }
        below = above;
      });
    }

    // Ticks of the steps, and of values whose scale has changed: these are plain numbers, the others begin at 0.
    scales() {
      const { chart } = this;
      const label = (tick, side, at) => {
        const made = make("span", "", shown(tick, "plain"));
        made.style[side] = `${100 * at}%`;
        return made;
      };
      const steps = ticks(domain[0], domain[1], 7, true);
      this.figure.querySelector(".xs").replaceChildren(...steps.map((tick) => label(tick, "left", across(tick))));
      if (chart.kind === "lines" && chart.whole[0] !== 0) {
        const values = chart.log ? decades(chart.low, chart.high) : ticks(chart.low, chart.high, 5, false);
        this.figure.querySelector(".ys").replaceChildren(...values.map((tick) => label(tick, "bottom", part(chart, tick))));
        const grid = values.map((tick) => `M0 ${(SIZE * (1 - part(chart, tick))).toFixed(1)}H${SIZE}`);
        this.svg.querySelector(".grid").setAttribute("d", grid.join(""));
      }
      this.back.hidden = domain === whole;
    }
  }

  function zoom(ends) {
    domain = ends;
    for (const view of views) {
      view.left();
      view.draw();
    }
  }

  const views = charts.map((chart) => new View(chart));
})();
