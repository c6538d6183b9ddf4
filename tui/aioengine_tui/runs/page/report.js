"use strict";
(() => {
  // The data is what report.py writes; nothing is fetched. Other people's text is only ever set as textContent.
  const data = JSON.parse(document.getElementById("data").textContent);
  const { meta, steps, requests } = data;
  const KINDS = data.kinds;
  const KIND_WORDS = {
    waiting: "waits", preempted: "preempted, waits again", prefill: "whole prompt", chunk: "part of a prompt",
    decode: "one token after the other", resumed: "computed again after a preemption", idle: "runs, but got nothing",
  };
  const STOP_LETTERS = data.letters;
  const STOP_WORDS = {
    queue_empty: "nobody waited", budget: "the token budget was used up", max_num_seqs: "max_num_seqs requests ran",
    no_blocks: "too few free KV blocks", preempted: "it had to preempt", in_flight: "the next one has a token in flight",
  };
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, cls) => {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    if (cls) e.className = cls;
    return e;
  };
  const num = (value, digits = 1) =>
    value === null || value === undefined ? "-" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });
  const ms = (value) =>
    value === null || value === undefined ? "-" : value >= 10000 ? num(value / 1000, 1) + " s" : value >= 1000 ? num(value / 1000, 2) + " s"
      : num(value, value < 10 ? 2 : value < 100 ? 1 : 0) + " ms";

  // ------------------------------------------------------------------ words
  $("subtitle").textContent = meta.subtitle;
  $("notes").textContent = meta.notes.join(" ");
  for (const [label, value] of data.summary) {
    const card = make("div", undefined, "card");
    card.append(make("b", value), make("span", label));
    $("summary").append(card);
  }
  {
    const head = make("tr");
    for (const name of ["", "p50", "p95", "p99", "mean", "samples"]) head.append(make("th", name));
    $("percentiles").append(head);
    for (const [label, values, count] of data.percentiles) {
      const row = make("tr");
      row.append(make("td", label), ...values.map((value) => make("td", ms(value))), make("td", num(count, 0)));
      $("percentiles").append(row);
    }
    for (const line of data.advice) $("advice").append(make("li", line));
    const bar = make("div", undefined, "stopbar");
    const words = [];
    data.stop_counts.forEach((count, index) => {
      if (!count) return;
      const part = make("div");
      part.style.flexGrow = count;
      part.style.background = stopColor(data.stops[index]);
      part.title = `${data.stops[index]}: ${count} steps`;
      bar.append(part);
      words.push(`${data.stops[index]} ${num((100 * count) / meta.num_steps)} %`);
    });
    $("stops").append(make("span", "admission stopped by: " + words.join(", "), "muted"), bar);
    $("config").textContent = JSON.stringify(data.config, null, 2);
    for (const kind of KINDS) {
      const entry = make("span"), box = make("i");
      box.style.background = `var(--${kind})`;
      entry.append(box, kind);
      entry.title = KIND_WORDS[kind];
      $("legend").append(entry);
    }
    $("legend").append(make("span", "first row, why no more were admitted: " + data.stops.filter((stop) => STOP_LETTERS[stop].trim()).map((stop) => `${STOP_LETTERS[stop]} ${stop}`).join(", ")));
  }
  function stopColor(stop) {
    return { queue_empty: "var(--decode)", budget: "var(--idle)", max_num_seqs: "var(--chunk)", no_blocks: "var(--preempted)", preempted: "var(--resumed)" }[stop] || "var(--waiting)";
  }

  // ------------------------------------------------------------------ theme
  const root = document.documentElement;
  root.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  $("theme").addEventListener("click", () => { root.classList.toggle("dark"); draw(); });
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // ------------------------------------------------------------------ the two x axes
  // Steps are kept every meta.stride-th. x is a step id, or milliseconds since the first event.
  const first = steps.id.length ? steps.id[0] : 0, last = steps.id.length ? steps.id[steps.id.length - 1] + 1 : 1;
  let byTime = false;
  let view = { from: first, to: last }, rowTop = 0, rowHeight = 14;
  let chosen = { step: null, request: null };
  const limits = () => (byTime ? [0, Math.max(meta.duration_ms, 1)] : [first, Math.max(last, first + 1)]);
  const indexOfStep = (id) => { let a = 0, b = steps.id.length; while (a < b) { const m = (a + b) >> 1; if (steps.id[m] <= id) a = m + 1; else b = m; } return Math.max(0, a - 1); };
  const indexOfTime = (t) => { let a = 0, b = steps.t.length; while (a < b) { const m = (a + b) >> 1; if (steps.t[m] <= t) a = m + 1; else b = m; } return Math.max(0, a - 1); };
  const xOfIndex = (i) => (byTime ? steps.t[i] : steps.id[i]);
  const indexOf = (x) => (byTime ? indexOfTime(x) : indexOfStep(x));

  function fit(canvas) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    }
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = color("ground"); c.fillRect(0, 0, width, height);
    c.font = "12px ui-monospace, monospace"; c.textBaseline = "middle";
    return [c, width, height];
  }

  // ------------------------------------------------------------------ over time
  const overview = $("overview"), LEFT = 170;
  overview.style.height = "180px";
  function drawOverview() {
    const [c, width, height] = fit(overview), [lo, hi] = limits(), plot = width - LEFT - 8;
    const bands = [
      ["KV blocks", meta.total_blocks, [["used", steps.u, "used"], ["cached", steps.c, "cached"]]],
      ["requests", 0, [["running", steps.r, "decode"], ["waiting", steps.w, "preempted"]]],
      ["tokens a step", 0, [["prompt", steps.pt, "prefill"], ["again", steps.rt, "resumed"], ["new", steps.k, "decode"]]],
    ];
    const bandHeight = height / bands.length;
    bands.forEach(([name, fixed, series], b) => {
      const top = b * bandHeight + 4, h = bandHeight - 10;
      let peak = fixed || 1;
      if (!fixed) for (const [, values] of series) for (const v of values) if (v > peak) peak = v;
      c.fillStyle = color("text"); c.fillText(name, 8, top + 8);
      c.fillStyle = color("muted"); c.fillText(`${fixed ? "of" : "peak"} ${num(peak, 0)}`, 8, top + 23);
      series.forEach(([label, values, role], s) => {
        c.fillStyle = color(role); c.fillText(label, 108, top + 8 + 14 * s);
        // The largest value of each pixel: a short peak is not lost.
        const columns = new Float64Array(Math.max(1, Math.ceil(plot)));
        for (let i = 0; i < values.length; i++) {
          const x = Math.floor(((xOfIndex(i) - lo) / (hi - lo)) * plot);
          if (x >= 0 && x < columns.length && values[i] > columns[x]) columns[x] = values[i];
        }
        const wide = values.length < columns.length ? Math.max(1, plot / Math.max(1, values.length)) : 1;
        c.globalAlpha = s && role !== "cached" ? 0.85 : 1;
        c.beginPath();
        for (let x = 0; x < columns.length; x++) if (columns[x] > 0) {
          const v = Math.max(1, (columns[x] / peak) * h);
          if (s === 0 && role !== "decode") c.rect(LEFT + x, top + h - v, Math.ceil(wide), v); else c.rect(LEFT + x, top + h - v, Math.ceil(wide), 2);
        }
        c.fill(); c.globalAlpha = 1;
      });
      c.strokeStyle = color("line"); c.strokeRect(LEFT + 0.5, top + 0.5, plot, h);
    });
    const a = LEFT + ((view.from - lo) / (hi - lo)) * plot, z = LEFT + ((view.to - lo) / (hi - lo)) * plot;
    c.fillStyle = color("window"); c.fillRect(a, 0, Math.max(2, z - a), height);
  }

  // ------------------------------------------------------------------ waterfall
  const canvas = $("waterfall"), NAMES = 150, HEAD = 34;
  canvas.style.height = "460px";
  let plotWidth = 100, plotRows = 10, shown = requests.map((_, row) => row);
  // Only requests that live in the shown part have a row; the one at the top stays there while the part changes.
  function chooseRows() {
    const top = shown[rowTop] || 0;
    shown = [];
    requests.forEach((request, row) => {
      if (!request.p.length) return;
      if (spanOf(request, request.p[0])[0] <= view.to && spanOf(request, request.p[request.p.length - 1])[1] >= view.from) shown.push(row);
    });
    const at = shown.findIndex((row) => row >= top);
    rowTop = Math.max(0, Math.min(at < 0 ? shown.length : at, shown.length - plotRows));
  }
  const spanOf = (request, piece) => {
    // A piece is [kind, first step, last step, start ms, end ms, tokens or list of tokens].
    return byTime ? [piece[3], piece[4]] : [piece[1], piece[2] + 1];
  };
  function drawWaterfall() {
    const [c, width, height] = fit(canvas);
    plotWidth = width - NAMES - 8; plotRows = Math.max(1, Math.floor((height - HEAD) / rowHeight));
    rowTop = Math.max(0, Math.min(rowTop, shown.length - plotRows));
    const scale = plotWidth / (view.to - view.from), colors = KINDS.map(color);
    const text = color("text"), muted = color("muted"), line = color("line");
    c.save(); c.beginPath(); c.rect(NAMES, 0, plotWidth, height); c.clip();
    const i0 = indexOf(view.from), i1 = Math.min(steps.id.length - 1, indexOf(view.to) + 1);
    // The axis, and a stripe with the letters of why no more were admitted.
    const cell = byTime ? 0 : scale * meta.stride, every = niceStep((view.to - view.from) / Math.max(1, plotWidth / 90));
    c.fillStyle = muted; c.strokeStyle = line;
    for (let x = Math.ceil(view.from / every) * every; x <= view.to; x += every) {
      const px = NAMES + (x - view.from) * scale;
      c.beginPath(); c.moveTo(px + 0.5, 0); c.lineTo(px + 0.5, height); c.stroke();
      c.fillText(byTime ? ms(x) : String(Math.round(x)), px + 3, 8);
    }
    const drawn = new Map();
    for (let i = i0; i <= i1; i++) {
      const px = NAMES + (xOfIndex(i) - view.from) * scale, letter = STOP_LETTERS[data.stops[steps.s[i]]];
      if (!letter.trim()) continue;
      const slot = Math.floor(px / 9);
      c.fillStyle = stopFill(data.stops[steps.s[i]]);
      c.fillRect(px, 28, Math.max(1, Math.min(cell || 2, 9)), 4);
      if (drawn.get(slot) === undefined) { drawn.set(slot, 1); c.fillStyle = text; c.fillText(letter, px, 21); }
    }
    for (let place = rowTop; place < Math.min(shown.length, rowTop + plotRows); place++) {
      const request = requests[shown[place]], y = HEAD + (place - rowTop) * rowHeight;
      for (const piece of request.p) {
        const [from, to] = spanOf(request, piece);
        if (to < view.from || from > view.to) continue;
        const x = NAMES + (from - view.from) * scale, w = Math.max(1, (to - from) * scale);
        const kind = KINDS[piece[0]], thin = kind === "waiting" || kind === "idle";
        c.fillStyle = colors[piece[0]];
        c.fillRect(x, y + (thin ? rowHeight * 0.4 : 1.5), w - (w > 4 ? 0.5 : 0), thin ? Math.max(2, rowHeight * 0.2) : rowHeight - 3);
        if (Array.isArray(piece[5]) && scale * 1 > 26 && !byTime) {
          c.fillStyle = color("ground");
          piece[5].forEach((n, k) => c.fillText(String(n), x + k * scale + 3, y + rowHeight / 2 + 0.5));
        }
      }
    }
    if (chosen.step !== null) {
      const i = indexOfStep(chosen.step), px = NAMES + ((byTime ? steps.t[i] : chosen.step) - view.from) * scale;
      c.strokeStyle = color("accent"); c.lineWidth = 1; c.strokeRect(px - 0.5, 14.5, Math.max(2, byTime ? 2 : scale), height - 16);
    }
    c.restore();
    for (let place = rowTop; place < Math.min(shown.length, rowTop + plotRows); place++) {
      const y = HEAD + (place - rowTop) * rowHeight, row = shown[place];
      c.fillStyle = chosen.request === row ? color("accent") : muted;
      c.fillText(clip(requests[row].id, 20), 6, y + rowHeight / 2);
    }
    c.fillStyle = muted; c.fillText(`${rowTop + 1}-${Math.min(shown.length, rowTop + plotRows)} of ${shown.length}`, 6, 8);
    c.fillText("why no more", 6, 22);
    if (shown.length > plotRows) {
      c.fillStyle = line;
      c.fillRect(width - 6, HEAD + (rowTop / shown.length) * (height - HEAD), 5, Math.max(8, (plotRows / shown.length) * (height - HEAD)));
    }
  }
  const stopFill = (stop) => color({ queue_empty: "decode", budget: "idle", max_num_seqs: "chunk", no_blocks: "preempted", preempted: "resumed" }[stop] || "waiting");
  const clip = (text, size) => (text.length > size ? text.slice(0, size - 1) + "\u2026" : text);
  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(Math.max(least, byTime ? 1e-3 : 1)));
    for (const factor of [1, 2, 5, 10]) if (factor * power >= least) return factor * power;
    return 10 * power;
  }
  function draw() { drawOverview(); drawWaterfall(); }

  // ------------------------------------------------------------------ moving
  function setView(from, to) {
    const [lo, hi] = limits(), least = byTime ? 0.05 : Math.min(4, hi - lo), size = Math.min(hi - lo, Math.max(least, to - from));
    from = Math.max(lo, Math.min(from, hi - size));
    view = { from, to: from + size };
    chooseRows();
    draw();
  }
  function zoom(factor, x) {
    const here = chosen.step === null ? null : byTime ? steps.t[indexOfStep(chosen.step)] : chosen.step;
    const middle = here !== null && here >= view.from && here <= view.to ? here : (view.from + view.to) / 2;
    const at = x === undefined ? middle : view.from + ((x - NAMES) / plotWidth) * (view.to - view.from);
    setView(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  $("zoom-in").addEventListener("click", () => zoom(0.5));
  $("zoom-out").addEventListener("click", () => zoom(2));
  $("zoom-all").addEventListener("click", () => setView(...limits()));
  $("by-time").addEventListener("change", (event) => {
    const indexes = [indexOf(view.from), indexOf(view.to)], whole = [view.from, view.to].join() === limits().join();
    byTime = event.target.checked;
    if (whole) setView(...limits()); else setView(xOfIndex(indexes[0]), xOfIndex(indexes[1]));
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = ((event.deltaX || event.deltaY) / plotWidth) * (view.to - view.from);
      setView(view.from + by, view.to + by);
    } else if (event.ctrlKey || event.altKey || event.offsetX > NAMES) zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
    else { rowTop += Math.sign(event.deltaY) * 3; drawWaterfall(); }
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, y: event.offsetY, view: { ...view }, rowTop, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) > 4) drag.moved = true;
    if (!drag.moved) return;
    rowTop = Math.round(drag.rowTop - dy / rowHeight);
    const by = (-dx / plotWidth) * (drag.view.to - drag.view.from);
    setView(drag.view.from + by, drag.view.to + by);
  });
  canvas.addEventListener("pointerup", (event) => { if (drag && !drag.moved) choose(event.offsetX, event.offsetY); drag = null; });
  canvas.addEventListener("keydown", (event) => {
    const by = (view.to - view.from) / 8;
    const moves = {
      ArrowLeft: () => setView(view.from - by, view.to - by), ArrowRight: () => setView(view.from + by, view.to + by),
      ArrowUp: () => { rowTop -= 1; draw(); }, ArrowDown: () => { rowTop += 1; draw(); },
      PageUp: () => { rowTop -= plotRows; draw(); }, PageDown: () => { rowTop += plotRows; draw(); },
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => setView(...limits()),
      "[": () => stepTo(-1), "]": () => stepTo(1),
    };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
  const jump = (event) => {
    const [lo, hi] = limits(), at = lo + ((event.offsetX - LEFT) / (overview.clientWidth - LEFT - 8)) * (hi - lo), half = (view.to - view.from) / 2;
    setView(at - half, at + half);
  };
  let sweeping = false;
  overview.addEventListener("pointerdown", (event) => {
    sweeping = true; overview.setPointerCapture(event.pointerId);
    const [lo, hi] = limits();
    if (view.to - view.from >= hi - lo) { view = { from: lo, to: lo + (hi - lo) / 8 }; }
    jump(event);
  });
  overview.addEventListener("pointermove", (event) => { if (sweeping) jump(event); });
  overview.addEventListener("pointerup", () => { sweeping = false; });
  $("find").addEventListener("change", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    if (!wanted) return;
    const row = requests.findIndex((request) => request.id.toLowerCase() === wanted);
    const near = row >= 0 ? row : requests.findIndex((request) => request.id.toLowerCase().includes(wanted));
    if (near >= 0 && !/^\d+$/.test(wanted)) showRequest(near, true);
    else if (/^\d+$/.test(wanted)) showStep(Number(wanted), true);
    else if (near < 0) event.target.select();
  });

  // ------------------------------------------------------------------ details
  function choose(x, y) {
    if (x > NAMES) {
      const at = view.from + ((x - NAMES) / plotWidth) * (view.to - view.from);
      showStep(byTime ? steps.id[indexOfTime(at)] : Math.floor(at), false);
    }
    const row = shown[rowTop + Math.floor((y - HEAD) / rowHeight)];
    if (y > HEAD && row !== undefined) showRequest(row, false);
  }
  const stepTo = (by) => { if (chosen.step !== null) showStep(chosen.step + by, true); };
  function sharesOf(step) {
    const shares = [];
    requests.forEach((request, row) => {
      for (const piece of request.p) {
        if (piece[1] > step || piece[2] < step) continue;
        const kind = KINDS[piece[0]];
        const tokens = ["waiting", "preempted", "idle"].includes(kind) ? 0 : Array.isArray(piece[5]) ? piece[5][step - piece[1]] : 1;
        shares.push([row, kind, tokens]);
      }
    });
    return shares;
  }
  function table(rows) {
    const t = make("table", undefined, "facts");
    for (const [label, value] of rows) { const r = make("tr"); r.append(make("td", label), make("td", value)); t.append(r); }
    return t;
  }
  function requestLink(row) {
    const link = make("button", requests[row].id || "(no name)", "link");
    link.type = "button"; link.addEventListener("click", () => showRequest(row, true));
    return link;
  }
  function stepLink(step, text) {
    const link = make("button", text === undefined ? `step ${step}` : text, "link");
    link.type = "button"; link.addEventListener("click", () => showStep(step, true));
    return link;
  }
  function showStep(step, move) {
    if (!steps.id.length) return;
    step = Math.max(first, Math.min(step, last - 1));
    chosen.step = step;
    if (move) { const x = byTime ? steps.t[indexOfStep(step)] : step, half = (view.to - view.from) / 2; if (x < view.from || x > view.to) setView(x - half, x + half); }
    const i = indexOfStep(step), exact = steps.id[i] === step, box = $("frame");
    $("frame-title").textContent = `Step ${step}`;
    box.replaceChildren();
    if (!exact) box.append(make("p", `Of every ${meta.stride} steps one is in this report; the numbers are those of step ${steps.id[i]}.`, "hint"));
    const stop = data.stops[steps.s[i]];
    box.append(table([
      ["began", `${ms(steps.t[i])} after the start, took ${ms(steps.e[i] === null ? null : steps.e[i] - steps.t[i])}`],
      ["tokens", `${num(steps.n[i], 0)} of a budget of ${num(steps.b[i], 0)}: ${num(steps.pt[i], 0)} of prompts, ${num(steps.rt[i], 0)} computed again`],
      ["sampled", `${num(steps.k[i], 0)} tokens`],
      ["admission stopped", `${stop}: ${STOP_WORDS[stop] || ""}`],
      ["requests", `${steps.r[i]} run, ${steps.w[i]} wait (${steps.p[i]} preempted before)`],
      ["KV blocks", `${steps.u[i]} of ${meta.total_blocks} used; ${steps.al[i]} allocated, ${steps.fr[i]} freed, ${steps.ev[i]} evicted`],
      ["preempts", `${steps.pr[i]} requests`],
    ]));
    const shares = sharesOf(step), list = make("div", undefined, "scroll"), t = make("table");
    for (const [row, kind, tokens] of shares) {
      const r = make("tr"), name = make("td"); name.append(requestLink(row));
      r.append(name, make("td", kind), make("td", tokens ? `${tokens} ${tokens === 1 ? "token" : "tokens"}` : "")); t.append(r);
    }
    list.append(t); box.append(list);
    draw();
  }
  function showRequest(row, move) {
    const request = requests[row], box = $("request");
    chosen.request = row;
    if (move) {
      const piece = request.p.find((p) => p[0] > 1) || request.p[0];
      if (piece) { const x = spanOf(request, piece)[0], half = (view.to - view.from) / 2; if (x < view.from || x > view.to) setView(x - half, x + half); }
      const place = shown.indexOf(row);
      if (place >= 0 && (place < rowTop || place >= rowTop + plotRows)) rowTop = Math.max(0, place - Math.floor(plotRows / 2));
    }
    $("request-title").textContent = `Request ${request.id}`;
    box.replaceChildren(table([
      ["arrived", `${ms(request.a)} after the start`],
      ["prompt", `${num(request.np, 0)} tokens, ${num(request.nc, 0)} of them from the prefix cache`],
      ["output", `${num(request.no, 0)} of at most ${num(request.max, 0)} tokens`],
      ["waited in the queue", ms(request.q)], ["first token after", ms(request.t)], ["whole time", ms(request.e)],
      ["preempted", `${request.pre} times`], ["priority", String(request.pri)],
      ["end", request.end || "not in this recording"],
    ]));
    if (request.g) {
      const why = make("p", `Its longest wait between two tokens was ${ms(request.g)}, ended by `);
      why.append(stepLink(request.gs));
      const prompts = sharesOf(request.gs).filter(([, kind]) => kind === "prefill" || kind === "chunk" || kind === "resumed");
      why.append(prompts.length ? `, which also computed ${prompts.map(([r, kind, n]) => `${n} tokens of ${requests[r].id} (${kind})`).slice(0, 4).join(", ")}.` : ".");
      box.append(why);
    }
    const list = make("div", undefined, "scroll"), t = make("table");
    for (const piece of request.p) {
      const r = make("tr"), where = make("td");
      where.append(stepLink(piece[1], piece[2] > piece[1] ? `steps ${piece[1]} to ${piece[2]}` : piece[2] < piece[1] ? `before step ${piece[1]}` : `step ${piece[1]}`));
      const n = Array.isArray(piece[5]) ? piece[5].reduce((a, b) => a + b, 0) : piece[5];
      r.append(where, make("td", KINDS[piece[0]]), make("td", n ? `${num(n, 0)} tokens` : ""), make("td", ms(piece[4] - piece[3]))); t.append(r);
    }
    list.append(t); box.append(list);
    if (request.prompt !== undefined) box.append(make("h2", "Prompt"), make("pre", request.prompt));
    if (request.text !== undefined) box.append(make("h2", "Output"), make("pre", request.text));
    draw();
  }
  new ResizeObserver(draw).observe(canvas);
  draw();
})();
