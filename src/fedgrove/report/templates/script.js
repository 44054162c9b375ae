"use strict";
// Theme: what was chosen before, or what the system prefers.
const root = document.documentElement;
const wantsDark = matchMedia("(prefers-color-scheme: dark)");
function kept(value) {
  // A browser may refuse storage to a page that is opened as a file.
  try {
    if (value) localStorage.setItem("fedgrove-theme", value);
    return localStorage.getItem("fedgrove-theme");
  } catch { return null; }
}
function show(theme) { root.dataset.theme = theme; }
show(kept() || (wantsDark.matches ? "dark" : "light"));
wantsDark.addEventListener("change", () => {
  if (!kept()) show(wantsDark.matches ? "dark" : "light");
});

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    show(next);
    kept(next);
  });

  // What the pointer is on: a bar or a cell, or else the nearest point of the figure.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let marked = null;
  const pointsOf = new WeakMap();
  function points(svg) {
    if (!pointsOf.has(svg)) {
      const found = [];
      for (const node of svg.querySelectorAll("circle[data-t], [data-x]")) {
        const x = +(node.getAttribute("cx") || node.dataset.x);
        const y = +(node.getAttribute("cy") || node.dataset.y);
        found.push([x, y, node]);
      }
      pointsOf.set(svg, found);
    }
    return pointsOf.get(svg);
  }
  function under(event) {
    const target = event.target;
    if (!(target instanceof Element)) return null;
    const svg = target.closest("figure svg");
    if (!svg) return null;
    const direct = target.closest("[data-t]");
    if (direct) return direct;
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const px = (event.clientX - box.left) * scale;
    const py = (event.clientY - box.top) * scale;
    let best = null;
    let least = 22 * 22;
    for (const [x, y, node] of points(svg)) {
      const far = (x - px) ** 2 + (y - py) ** 2;
      if (far < least && !node.parentNode.classList.contains("off")) { least = far; best = node; }
    }
    return best;
  }
  function mark(node) {
    if (marked) marked.classList.remove("on");
    marked = node;
    tip.hidden = !node;
    if (!node) return;
    node.classList.add("on");
    tip.textContent = node.dataset.t;
    const box = node.getBoundingClientRect();
    const left = box.left + box.width / 2 - tip.offsetWidth / 2;
    const most = root.clientWidth - tip.offsetWidth - 4;
    tip.style.left = Math.max(4, Math.min(left, most)) + scrollX + "px";
    const above = box.top - tip.offsetHeight - 8;
    tip.style.top = (above > 0 ? above : box.bottom + 8) + scrollY + "px";
  }
  document.addEventListener("pointermove", (event) => mark(under(event)));
  document.addEventListener("pointerleave", () => mark(null));

  // A legend hides and shows what it names.
  for (const name of document.querySelectorAll(".legend button")) {
    name.addEventListener("click", () => {
      const isShown = name.getAttribute("aria-pressed") === "true";
      name.setAttribute("aria-pressed", String(!isShown));
      const figure = name.closest("figure");
      for (const i of name.dataset.of.split(" ")) {
        figure.querySelector(`[data-s="${i}"]`).classList.toggle("off", isShown);
      }
    });
  }

  // A chart can be kept as a file of its own, in the colours that are shown now.
  const looks = ["fill", "fill-opacity", "opacity", "stroke", "stroke-width", "stroke-dasharray", "font-size", "text-anchor"];
  function copyLooks(from, to) {
    const style = getComputedStyle(from);
    for (const look of looks) to.setAttribute(look, style.getPropertyValue(look));
    [...from.children].forEach((child, i) => copyLooks(child, to.children[i]));
  }
  function chartFile(figure) {
    const svg = figure.querySelector("svg");
    const copy = svg.cloneNode(true);
    const xmlns = svg.namespaceURI;
    copyLooks(svg, copy);
    for (const off of copy.querySelectorAll(".off")) off.remove();
    const { width, height } = svg.viewBox.baseVal;
    let x = 4;
    // The legend of the page, below the chart.
    for (const name of figure.querySelectorAll(".legend button[aria-pressed=true]")) {
      const text = document.createElementNS(xmlns, "text");
      text.textContent = "■ " + name.textContent;
      text.setAttribute("x", x);
      text.setAttribute("y", height + 14);
      text.setAttribute("fill", getComputedStyle(name.querySelector("i")).backgroundColor);
      text.setAttribute("font-size", "10px");
      copy.append(text);
      x += 5.8 * (name.textContent.length + 4);
    }
    copy.setAttribute("xmlns", xmlns);
    copy.setAttribute("font-family", "sans-serif");
    copy.setAttribute("viewBox", `0 0 ${Math.max(width, x)} ${height + 20}`);
    for (const node of copy.querySelectorAll("[data-t]")) node.removeAttribute("data-t");
    return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  }
  for (const figure of document.querySelectorAll("figure")) {
    const title = figure.querySelector("figcaption");
    const name = title.textContent.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    const save = document.createElement("button");
    save.className = "plain";
    save.textContent = "SVG";
    save.title = "save this chart as a file";
    save.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(chartFile(figure));
      link.download = `${name}.svg`;
      link.click();
      URL.revokeObjectURL(link.href);
    });
    title.append(save);
  }

  // Tables are sorted by the column that is clicked, numbers as numbers.
  const units = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, ms: 1e-3, min: 60, h: 3600 };
  function worth(cell) {
    const text = cell.textContent.replace(/,/g, "");
    const number = parseFloat(text);
    if (Number.isNaN(number)) return text;
    // 900 KiB are less than 3 MiB.
    return number * (units[text.split(" ")[1]] ?? 1);
  }
  function before(a, b) {
    const kinds = (typeof a === "number" ? 0 : 1) - (typeof b === "number" ? 0 : 1);
    if (kinds) return kinds;
    return a < b ? -1 : a > b ? 1 : 0;
  }
  function sort(head) {
    const table = head.closest("table");
    const column = [...head.parentNode.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [worth(row.cells[column]), row]);
    rows.sort((a, b) => (up ? before(a[0], b[0]) : before(b[0], a[0])));
    const least = table.dataset.shown ? +table.dataset.shown : Infinity;
    rows.forEach(([, row], i) => { row.hidden = i >= least; });
    body.append(...rows.map(([, row]) => row));
  }
  for (const head of document.querySelectorAll("table.sortable th")) {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(head); });
  }
  for (const more of document.querySelectorAll("button.more")) {
    more.addEventListener("click", () => {
      const table = more.previousElementSibling.querySelector("table");
      delete table.dataset.shown;
      for (const row of table.tBodies[0].rows) row.hidden = false;
      more.remove();
    });
  }

  // A click on a client's point finds its row.
  document.addEventListener("click", (event) => {
    const node = under(event);
    // A finger does not hover: what it touches is told too.
    mark(node);
    if (!node || !node.dataset.k) return;
    for (const row of document.querySelectorAll("tr.on")) row.classList.remove("on");
    const row = document.querySelector(`tr[data-k="${CSS.escape(node.dataset.k)}"]`);
    if (!row) return;
    row.hidden = false;
    row.classList.add("on");
    row.scrollIntoView({ block: "center" });
  });

  for (const copy of document.querySelectorAll("button.copy")) {
    copy.addEventListener("click", async () => {
      const text = copy.parentNode.querySelector("pre").textContent;
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = "copied";
      } catch {
        // Not allowed here: select it, so that one key is enough.
        getSelection().selectAllChildren(copy.parentNode.querySelector("pre"));
      }
    });
  }
});
