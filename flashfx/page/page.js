"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const root = document.documentElement;

  // theme: the system's until the button is pressed
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const paint = () => { root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light"); };
  dark.addEventListener("change", paint);
  document.getElementById("theme").addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; paint(); });
  paint();

  // the tile under the pointer
  const tip = document.querySelector(".tip");
  const words = { s: "skipped: no query sees a key", f: "full: the mask is not evaluated", p: "partial: the mask is evaluated", d: "decided at run time: the data may hide all of it, a part or nothing" };
  for (const svg of all("svg.mask")) {
    const rows = svg.dataset.rows.split(" "), { m, n } = svg.dataset, M = +svg.dataset.queries, N = +svg.dataset.keys;
    const cursor = svg.querySelector(".cursor"), box = svg.viewBox.baseVal;
    let at = [0, 0];
    const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
    const show = (r, c, x, y) => {
      at = [r = Math.min(rows.length - 1, Math.max(0, r)), c = Math.min(rows[r].length - 1, Math.max(0, c))];
      tip.textContent = `queries ${r * m} … ${Math.min(M, (r + 1) * m) - 1}\nkeys    ${c * n} … ${Math.min(N, (c + 1) * n) - 1}\n${words[rows[r][c]]}`;
      tip.style.left = Math.min(x + 16, innerWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = y + 16 + "px";
      tip.style.visibility = cursor.style.visibility = "visible";
      cursor.setAttribute("x", c * box.width / rows[r].length);
      cursor.setAttribute("y", r * box.height / rows.length);
    };
    svg.addEventListener("pointermove", (event) => {
      const seen = svg.getBoundingClientRect();
      show(Math.floor((event.clientY - seen.top) / seen.height * rows.length), Math.floor((event.clientX - seen.left) / seen.width * rows[0].length), event.clientX, event.clientY);
    });
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!by) return;
      event.preventDefault();
      const seen = svg.getBoundingClientRect(), [r, c] = [at[0] + by[0], at[1] + by[1]];
      show(r, c, seen.left + (c + 1) * seen.width / rows[0].length, seen.top + (r + 1) * seen.height / rows.length);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
  }

  // graphs: drag, wheel, buttons
  for (const view of all(".viewport")) {
    const svg = view.querySelector("svg"), scene = svg.querySelector(".scene");
    let x = 0, y = 0, k = 1, held = null;
    const draw = () => scene.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
    const unit = () => { const ctm = svg.getScreenCTM(); return ctm ? ctm.a : 1; };
    const zoom = (by, px, py) => { const to = Math.min(8, Math.max(0.3, k * by)); x = px - (px - x) * to / k; y = py - (py - y) * to / k; k = to; draw(); };
    const point = (event) => { const p = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()); return [p.x, p.y]; };
    view.addEventListener("wheel", (event) => { if (!event.ctrlKey && !event.altKey && !view.matches(":focus-within")) return; event.preventDefault(); zoom(Math.exp(-event.deltaY / 400), ...point(event)); }, { passive: false });
    view.addEventListener("pointerdown", (event) => { if (event.target.closest("button")) return; held = [event.clientX, event.clientY]; view.setPointerCapture(event.pointerId); view.focus({ preventScroll: true }); });
    view.addEventListener("pointermove", (event) => { if (!held) return; x += (event.clientX - held[0]) / unit(); y += (event.clientY - held[1]) / unit(); held = [event.clientX, event.clientY]; draw(); });
    view.addEventListener("pointerup", () => { held = null; });
    view.addEventListener("keydown", (event) => {
      const by = { ArrowUp: [0, 60], ArrowDown: [0, -60], ArrowLeft: [60, 0], ArrowRight: [-60, 0] }[event.key], larger = { "+": 1.4, "=": 1.4, "-": 1 / 1.4 }[event.key];
      if (event.target !== view || !(by || larger)) return;
      event.preventDefault();
      if (by) { x += by[0]; y += by[1]; draw(); } else zoom(larger, svg.viewBox.baseVal.width / 2, svg.viewBox.baseVal.height / 2);
    });
    // large graphs open at a readable size, at their output; small ones as a whole
    const start = () => {
      x = y = 0; k = 1; draw();
      const last = svg.querySelector(".node.output, .node.stop") ?? svg.querySelector(".node");
      const seen = svg.getBoundingClientRect(), readable = 0.7 / unit();
      if (!seen.width || readable <= 1.35) return;
      const at = last.getBBox(), box = svg.viewBox.baseVal;
      k = readable; x = box.width / 2 - (at.x + at.width / 2) * k; y = box.height - (at.y + at.height) * k - 4 + (seen.height / unit() - box.height) / 2 - 8 / unit(); draw();
    };
    const around = view.closest("details");
    let begun = false;
    const begin = () => { if (!begun && around.open) { begun = true; start(); } };
    around.addEventListener("toggle", begin);
    requestAnimationFrame(begin);
    const middle = () => [svg.dataset.w / 2, svg.dataset.h / 2];
    all("button", view).forEach((button) => button.addEventListener("click", () => {
      if (button.dataset.zoom) zoom(+button.dataset.zoom, ...middle()); else if (k !== 1 || x || y) { x = y = 0; k = 1; draw(); } else start();
    }));
  }

  // generated source: one block at a time; lines of a role light up together
  for (const kernel of all(".kernel")) {
    const tabs = all("[role=tab]", kernel);
    tabs.forEach((tab, n) => tab.addEventListener("keydown", (event) => {
      const to = tabs[n + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? NaN)];
      if (to) { event.preventDefault(); to.focus(); to.click(); }
    }));
    tabs.forEach((tab) => tab.addEventListener("click", () => {
      tabs.forEach((other) => other.setAttribute("aria-selected", other === tab));
      all("[data-block]", kernel).forEach((block) => { block.hidden = tab.dataset.show !== "all" && block.dataset.block !== tab.dataset.show; });
    }));
    const light = (role, on) => all(`[data-role="${role}"]`, kernel).forEach((part) => part.classList.toggle("on", on));
    for (const part of all("[data-role]", kernel)) {
      part.addEventListener("pointerenter", () => light(part.dataset.role, true));
      part.addEventListener("pointerleave", () => light(part.dataset.role, false));
    }
  }

  const said = (button, text) => { const before = button.textContent; button.textContent = text; setTimeout(() => { button.textContent = before; }, 1200); };
  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); } catch {
      const area = document.createElement("textarea");
      area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    }
  };
  for (const button of all("[data-copy]"))
    button.addEventListener("click", async () => { await copy(document.getElementById(button.dataset.copy).textContent); said(button, "Copied"); });
  for (const button of all("[data-save]"))
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([document.getElementById(button.dataset.save).textContent], { type: "text/x-python" }));
      link.download = button.dataset.name; link.click(); URL.revokeObjectURL(link.href);
    });
  for (const button of all("[data-all]"))
    button.addEventListener("click", () => { const open = button.dataset.all === "open"; all("details").forEach((part) => { part.open = open; }); button.dataset.all = open ? "close" : "open"; button.textContent = open ? "Close all" : "Open all"; });
})();
