// Draws the plots of a report with uPlot, from the data in the page. Lines and levels are medians;
// dots are samples; whiskers are intervals. With #check in the address the page writes the points
// that it has drawn, read back from the pixels, into an element of its own, for a test.
"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawn = [];
  const isChecked = location.hash === "#check";
  // As narrow as a phone: the window of a browser without a screen may not be.
  if (isChecked) document.documentElement.style.width = "360px";

  // Pixels between the samples of two levels.
  const LEVEL_ROOM = 9;

  // Numbers as the tables have them: three significant digits.
  const digits = (value) => {
    const size = Math.abs(value);
    return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
  };
  const short = (value) => String(Number(digits(value)));
  const scaled = (value, steps, write) => {
    const size = Math.abs(value);
    const [by, unit] = steps.find(([least]) => size >= least) || steps[steps.length - 1];
    return `${write(value / by)}${unit}`;
  };
  const NS = [[1e9, " s"], [1e6, " ms"], [1e3, " us"], [1, " ns"]];
  const BYTES = [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]];
  const MANY = [[1e9, "g"], [1e6, "m"], [1e3, "k"], [1, ""]];
  const write = (axis, value, digit = digits) => {
    if (value === null || value === undefined) return "-";
    switch (axis.unit) {
      case "ns": return value === 0 ? "0" : scaled(value, NS, digit);
      case "bytes": return scaled(value, BYTES, short);
      case "per_s": return `${scaled(value, MANY, short)}/s`;
      case "share": return `${Math.abs(value) < 0.01 && value !== 0 ? value * 100 < 0.001
        ? (value * 100).toPrecision(2) : (value * 100).toFixed(3) : digit(value * 100)} %`;
      case "name": return axis.names[value] ?? "";
      default: return digit(value);
    }
  };

  // 1, 2 and 5 times powers of ten.
  const decades = (low, high) => {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const of of [1, 2, 5]) {
        const value = of * 10 ** power;
        if (value >= low && value <= high) all.push(value);
      }
    }
    return all.length > 9 ? all.filter((value) => String(value.toExponential())[0] === "1") : all;
  };

  // The stroke and the shape of the marks of a line, by its index. A way has one colour in all its
  // lines: `auto` the first one, copies the last one, others the next free one.
  const wayOf = (line) => line.name.replace(/^\d+: /, "").split(",")[0];
  const isCopy = (line) => /memcpy|copy loop|fastest copy|the base/.test(line.name);
  const style = (plot, index) => {
    const line = plot.lines[index];
    const ways = [...new Set(plot.lines.filter((of) => !of.theirs && !isCopy(of)).map(wayOf))]
      .filter((way) => way !== "auto");
    const nth = ways.indexOf(wayOf(line));
    const isFirst = wayOf(line) === "auto" || plot.lines.length === 1;
    const number = isFirst ? 0 : isCopy(line) ? 7 : 1 + (nth % 6);
    // Lines of one way and one kind differ by the shape of their marks.
    const alike = plot.lines.slice(0, index)
      .filter((of) => of.level === line.level && wayOf(of) === wayOf(line)).length;
    return {
      stroke: colour(line.theirs ? "--theirs" : `--c${number}`),
      shape: line.theirs ? 4 : (alike + Math.floor(Math.max(0, nth) / 6)) % 4,
      dash: line.theirs ? [6, 4] : [],
      width: wayOf(line) === "auto" ? 2.8 : 1.8,
    };
  };

  const mark = (context, shape, x, y, r) => {
    context.beginPath();
    if (shape === 1) context.rect(x - r, y - r, 2 * r, 2 * r);
    else if (shape === 2 || shape === 3) {
      const up = shape === 2 ? 1 : -1;
      context.moveTo(x, y - up * r * 1.3);
      context.lineTo(x + r * 1.2, y + up * r);
      context.lineTo(x - r * 1.2, y + up * r);
      context.closePath();
    } else context.arc(x, y, r, 0, 2 * Math.PI);
    if (shape === 4) {
      context.setLineDash([]);
      context.lineWidth = r / 2;
      context.stroke();
    } else context.fill();
  };

  // The horizontal places of all points, once each.
  const placesOf = (plot) => {
    const all = plot.lines.flatMap((line) => line.points.map((point) => point.x));
    const places = [...new Set(all.filter((x) => x !== null))].sort((a, b) => a - b);
    return places.length ? places : [0, 1];
  };

  class View {
    constructor(figure) {
      this.index = Number(figure.dataset.plot);
      this.plot = plots[this.index];
      this.shown = this.plot.lines.map((line) => line.shown || isChecked);
      this.places = placesOf(this.plot);
      this.isStrip = this.plot.x.unit === "name"
        && this.plot.lines.every((line) => line.level || line.points.length === 1);
      this.at = null;
      this.canvas = figure.querySelector(".canvas");
      this.lines = figure.querySelector(".lines");
      this.readout = figure.querySelector(".readout");
      this.live = figure.querySelector(".live");
      this.lookup = this.plot.lines.map((line) => new Map(line.points.map((of) => [of.x, of])));
      this.keys();
      this.build();
      new ResizeObserver(() => this.resize()).observe(this.canvas);
      dark.addEventListener("change", () => this.build());
    }

    size() {
      const width = Math.max(240, Math.floor(this.canvas.clientWidth));
      return { width, height: Math.round(Math.min(440, Math.max(270, width * 0.5))) };
    }

    resize() {
      const size = this.size();
      if (this.u && size.width !== this.u.width) this.u.setSize(size);
    }

    // The point of a line at a place; a level has one everywhere.
    point(line, place) {
      return this.plot.lines[line].level ? this.plot.lines[line].points[0]
        : this.lookup[line].get(place);
    }

    data() {
      const values = this.plot.lines.map((line, index) =>
        this.places.map((place) => this.point(index, place)?.y ?? null));
      return [this.places, ...values];
    }

    extent() {
      let [low, high] = [Infinity, -Infinity];
      this.plot.lines.forEach((line, index) => {
        if (!this.shown[index]) return;
        for (const point of line.points) {
          for (const y of [point.y, ...(point.interval || []), ...point.samples]) {
            if (!this.plot.y.log || y > 0) [low, high] = [Math.min(low, y), Math.max(high, y)];
          }
        }
      });
      if (low > high) return this.plot.y.log ? [1, 10] : [0, 1];
      if (this.plot.y.log) return [low / 1.15, high * 1.15];
      const room = (high - Math.min(0, low)) * 0.06 || 1;
      return [low < 0 ? low - room : 0, high + room];
    }

    reach() {
      const [first, last] = [this.places[0], this.places[this.places.length - 1]];
      if (this.plot.x.unit === "name") return [-0.5, this.plot.x.names.length - 0.5];
      if (this.plot.x.log && first === last) return [first / 2, first * 2];
      if (this.plot.x.log) return [first / 1.25, last * (last / first) ** this.levelRoom() * 1.15];
      const room = (last - first) * 0.03 || Math.abs(first) * 0.1 || 1;
      return [this.plot.x.unit === "ns" ? 0 : first - room, last + room];
    }

    // The room for the samples of levels at the right end, as a part of the width before it.
    levelRoom() {
      const room = this.levels().length * LEVEL_ROOM / Math.max(200, this.canvas.clientWidth - 90);
      return room / (1 - Math.min(0.5, room));
    }

    // The indices of the shown levels that have samples.
    levels() {
      const all = this.plot.lines.map((line, index) => index);
      return all.filter((index) => this.shown[index] && this.plot.lines[index].level
        && this.plot.lines[index].points[0].samples.length > 0);
    }

    // Places with room for their words.
    ticks(u) {
      const { x } = this.plot;
      if (x.unit === "ns") return null;
      const room = x.unit === "name" ? 14 : 58;
      let last = -Infinity;
      return this.places.filter((place) => {
        const left = u.valToPos(place, "x");
        if (left - last < room) return false;
        last = left;
        return true;
      });
    }

    options() {
      const { x, y } = this.plot;
      const [text, grid] = [colour("--faint"), colour("--grid")];
      const font = "12px system-ui, sans-serif";
      const axis = { stroke: text, font, labelFont: font, grid: { stroke: grid, width: 1 },
        ticks: { stroke: grid, width: 1, size: 5 } };
      const series = this.plot.lines.map((line, index) => ({
        label: line.name, show: this.shown[index], scale: "y", spanGaps: true,
        stroke: style(this.plot, index).stroke, dash: style(this.plot, index).dash,
        width: style(this.plot, index).width, points: { show: false },
        ...(line.level || this.isStrip ? { paths: () => null } : {}),
        ...(line.steps ? { paths: uPlot.paths.stepped({ align: -1 }) } : {}),
      }));
      const ownTicks = x.unit !== "ns";
      return {
        ...this.size(), series: [{}, ...series], legend: { show: false },
        padding: [14, 14, 0, 0],
        scales: {
          x: { time: false, distr: x.log ? 3 : 1, log: x.unit === "bytes" ? 2 : 10,
            range: () => this.reach() },
          y: { distr: y.log ? 3 : 1, log: 10, range: () => this.extent() },
        },
        axes: [
          { ...axis, label: x.label || null, labelSize: x.label ? 22 : 0, size: 34,
            ...(ownTicks ? { splits: (u) => this.ticks(u), filter: (u, all) => all } : {}),
            values: (u, all) => all.map((value) => write(x, value, short)) },
          { ...axis, label: y.label, labelSize: 20, size: 64,
            ...(y.log ? { splits: (u, i, low, high) => decades(low, high), filter: (u, all) => all }
              : {}),
            values: (u, all) => all.map((value) => write(y, value, short)) },
        ],
        cursor: { drag: { x: false, y: false, setScale: false }, y: false,
          points: { show: !this.isStrip, size: 9 } },
        hooks: {
          drawClear: [(u) => this.drawSpans(u)],
          draw: [(u) => this.drawPoints(u)],
          setCursor: [(u) => this.follow(u)],
        },
      };
    }

    build() {
      this.u?.destroy();
      this.u = new uPlot(this.options(), this.data(), this.canvas);
      this.buttons();
    }

    drawSpans(u) {
      const { ctx: context, bbox } = u;
      const ratio = devicePixelRatio;
      context.save();
      context.font = `${11 * ratio}px system-ui, sans-serif`;
      Object.assign(context, { textAlign: "left", textBaseline: "top" });
      let taken = -Infinity;
      this.plot.spans.forEach(({ range, name }) => {
        const [from, to] = range.map((x) => u.valToPos(x, "x", true));
        context.fillStyle = colour("--span");
        context.fillRect(from, bbox.top, Math.max(2, to - from), bbox.height);
        context.fillStyle = colour("--faint");
        const wide = context.measureText(name).width;
        const left = Math.min(from + 4 * ratio, bbox.left + bbox.width - wide);
        // Below the words before, if there is no room beside them.
        context.fillText(name, left, bbox.top + (left < taken ? 2 : -12) * ratio);
        taken = left + wide + 4 * ratio;
      });
      context.restore();
    }

    drawPoints(u) {
      const { ctx: context, bbox } = u;
      const ratio = devicePixelRatio;
      const seen = this.plot.lines.map(() => []);
      context.save();
      context.beginPath();
      context.rect(bbox.left, bbox.top - 2, bbox.width, bbox.height + 4);
      context.clip();
      this.plot.lines.forEach((line, index) => {
        if (!this.shown[index]) return;
        const { stroke, shape, dash, width } = style(this.plot, index);
        Object.assign(context, { fillStyle: stroke, strokeStyle: stroke });
        for (const point of line.points) {
          const y = u.valToPos(point.y, "y", true);
          if (line.level) {
            this.drawLevel(context, bbox, y, dash, width);
            const nth = this.levels().reverse().indexOf(index);
            const x = bbox.left + bbox.width - (nth + 0.6) * LEVEL_ROOM * ratio;
            const samples = this.drawSamples(u, context, x, 0, point.samples);
            if (point.interval) this.drawInterval(u, context, x, point.interval);
            if (line.theirs) this.drawSource(context, bbox, y, line.name);
            seen[index].push({ from: point.from, y: u.posToVal(y, "y", true), samples });
            continue;
          }
          const x = u.valToPos(point.x, "x", true);
          const step = this.isStrip ? u.valToPos(1, "x", true) - u.valToPos(0, "x", true) : 0;
          const samples = this.drawSamples(u, context, x, step * 0.5, point.samples);
          if (point.interval) this.drawInterval(u, context, x, point.interval);
          if (this.plot.spans.length === 0) mark(context, shape, x, y, 3.6 * ratio);
          seen[index].push({ from: point.from, x: u.posToVal(x, "x", true),
            y: u.posToVal(y, "y", true), samples });
        }
      });
      context.restore();
      drawn[this.index] = seen;
    }

    // Draws samples beside a place, and returns them as they were drawn.
    drawSamples(u, context, x, width, samples) {
      context.globalAlpha = 0.45;
      const all = samples.map((sample, nth) => {
        const aside = width * (((nth * 0.618034 + 0.5) % 1) - 0.5);
        const at = u.valToPos(sample, "y", true);
        mark(context, 0, x + aside, at, 2 * devicePixelRatio);
        return u.posToVal(at, "y", true);
      });
      context.globalAlpha = 1;
      return all;
    }

    // The source of a published level, above its line.
    drawSource(context, bbox, y, name) {
      const ratio = devicePixelRatio;
      context.font = `${11 * ratio}px system-ui, sans-serif`;
      Object.assign(context, { textAlign: "left", textBaseline: "bottom" });
      context.fillText(name.replace(" (their machine)", ""), bbox.left + 6 * ratio, y - 2 * ratio);
    }

    drawLevel(context, bbox, y, dash, width) {
      const ratio = devicePixelRatio;
      context.lineWidth = width * ratio;
      context.setLineDash(dash.length ? dash.map((of) => of * ratio) : [1.5 * ratio, 3 * ratio]);
      context.beginPath();
      context.moveTo(bbox.left, y);
      context.lineTo(bbox.left + bbox.width, y);
      context.stroke();
      context.setLineDash([]);
    }

    drawInterval(u, context, x, interval) {
      const ratio = devicePixelRatio;
      const [low, high] = interval.map((of) => u.valToPos(of, "y", true));
      const half = 4 * ratio;
      context.lineWidth = 1.6 * ratio;
      context.beginPath();
      context.moveTo(x, low);
      context.lineTo(x, high);
      for (const end of [low, high]) {
        context.moveTo(x - half, end);
        context.lineTo(x + half, end);
      }
      context.stroke();
    }

    // A button for each line shows or hides it.
    buttons() {
      this.lines.replaceChildren(...this.plot.lines.map((line, index) => {
        const button = document.createElement("button");
        button.type = "button";
        const { stroke, shape, dash } = style(this.plot, index);
        button.innerHTML = swatch(stroke, shape, line.level && !dash.length ? [1.5, 3] : dash,
          this.isStrip && !line.level);
        button.append(line.name);
        button.setAttribute("aria-pressed", this.shown[index]);
        button.addEventListener("click", () => {
          this.shown[index] = !this.shown[index];
          button.setAttribute("aria-pressed", this.shown[index]);
          this.u.setSeries(index + 1, { show: this.shown[index] });
          this.u.redraw(true, true);
        });
        const item = document.createElement("li");
        item.append(button);
        return item;
      }));
      if (this.plot.lines.length < 3) return;
      const all = document.createElement("button");
      all.type = "button";
      const isAll = () => this.shown.every((shown) => shown);
      const name = () => { all.textContent = isAll() ? "Hide all" : "Show all"; };
      all.addEventListener("click", () => {
        const to = !isAll();
        this.shown = this.shown.map(() => to);
        this.build();
        this.lines.lastChild.firstChild.focus();
      });
      this.lines.addEventListener("click", name);
      name();
      const item = document.createElement("li");
      item.append(all);
      this.lines.append(item);
    }

    // The numbers of all shown lines at a place.
    words(place) {
      const { x, y } = this.plot;
      const all = this.plot.lines.flatMap((line, index) => {
        const point = this.point(index, place);
        if (!this.shown[index] || !point) return [];
        const interval = point.interval
          ? ` (${write(y, point.interval[0])} to ${write(y, point.interval[1])})` : "";
        return [{ name: line.name, number: write(y, point.y) + interval, level: line.level }];
      });
      const own = all.filter((of) => !of.level);
      return { place: write(x, place), all: this.isStrip && own.length ? own : all };
    }

    follow(u) {
      const place = u.cursor.idx === null || u.cursor.idx === undefined ? null
        : this.places[u.cursor.idx];
      if (place === null || u.cursor.left < 0) return;
      this.at = u.cursor.idx;
      const { place: where, all } = this.words(place);
      const head = document.createElement("b");
      head.textContent = where;
      this.readout.replaceChildren(head,
        all.length ? `: ${all.map((of) => `${of.name} ${of.number}`).join("; ")}` : ": no line shown");
    }

    // Arrow keys go from place to place, and say the numbers there.
    keys() {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10,
        Home: -Infinity, End: Infinity };
      this.canvas.addEventListener("keydown", (event) => {
        const step = steps[event.key];
        if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        const last = this.places.length - 1;
        const from = this.at ?? (step > 0 ? -1 : last + 1);
        this.at = Math.min(last, Math.max(0, from + step));
        const place = this.places[this.at];
        this.u.setCursor({ left: this.u.valToPos(place, "x"), top: this.u.over.clientHeight / 2 });
        const { place: where, all } = this.words(place);
        this.live.textContent = `${where}: ${all.map((of) => `${of.name}, ${of.number}`).join(". ")}`;
      });
    }
  }

  const swatch = (stroke, shape, dash, isDot) => {
    const line = isDot ? "" : `<line x1="0" y1="7" x2="26" y2="7" stroke="${stroke}" stroke-width="2" `
      + `stroke-dasharray="${dash.join(" ")}"/>`;
    const marks = [`<circle cx="13" cy="7" r="4" fill="${stroke}"/>`,
      `<rect x="9" y="3" width="8" height="8" fill="${stroke}"/>`,
      `<path d="M13 2l5 9h-10z" fill="${stroke}"/>`, `<path d="M13 12l5-9h-10z" fill="${stroke}"/>`,
      `<circle cx="13" cy="7" r="4" fill="none" stroke="${stroke}" stroke-width="2"/>`];
    return `<svg width="26" height="14" aria-hidden="true">${line}${marks[shape]}</svg>`;
  };

  document.documentElement.classList.remove("no-script");
  document.querySelectorAll("figure[data-plot]").forEach((figure) => new View(figure));

  const save = document.getElementById("save");
  save.hidden = false;
  save.addEventListener("click", () => {
    const text = document.getElementById("result").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "pageleap.json";
    link.click();
  });

  if (isChecked) {
    // uPlot draws in a microtask.
    setTimeout(() => {
      const first = document.querySelector("figure[data-plot]");
      if (first) first.querySelector(".canvas").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      const check = document.createElement("pre");
      check.id = "check";
      check.textContent = JSON.stringify({ drawn, spoken: first ? first.querySelector(".live").textContent : "",
        wide: document.body.scrollWidth, room: document.body.clientWidth });
      document.body.append(check);
    }, 50);
  }
})();
