"use strict";
// Shows the values at the step under the pointer, in all charts at once; with a focused chart, the arrow keys move.
(() => {
  const { steps, elapsed, metrics } = JSON.parse(document.getElementById("data").textContent);
  const spoken = document.getElementById("spoken");
  const svgElement = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);

  // As text.py writes numbers and times.
  const number = (value) => {
    if (typeof value !== "number") return value ?? "–"; // NaN and infinity are text, absent is null
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 0.01 || size >= 1e7) return value.toExponential(1);
    if (size >= 1000) return value.toFixed(0).replace(/\B(?=(\d{3})+$)/g, ",");
    return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  };
  const duration = (seconds) => {
    const [length, unit] = seconds < 60 ? [1, "s"] : seconds < 3600 ? [60, "min"] : [3600, "h"];
    return `${(seconds / length).toFixed(1)} ${unit}`;
  };

  const plots = [...document.querySelectorAll(".plot")].map((element) => {
    const place = JSON.parse(element.dataset.place);
    const svg = element.querySelector("svg");
    const cursor = svg.appendChild(svgElement("g"));
    cursor.setAttribute("class", "cursor");
    const line = cursor.appendChild(svgElement("line"));
    line.setAttribute("y1", place.box[1]);
    line.setAttribute("y2", place.box[3]);
    const names = place.dots ? JSON.parse(element.dataset.series) : [];
    const dots = names.map((name, position) => {
      const dot = cursor.appendChild(svgElement("circle"));
      dot.setAttribute("r", 4);
      dot.style.fill = `var(--s${(position % 6) + 1})`;
      return { dot, name };
    });
    const label = cursor.appendChild(svgElement("text"));
    label.setAttribute("y", 10); // above the axes and what stands on them
    cursor.style.display = "none";
    return { element, svg, place, cursor, line, dots, label };
  });
  const readouts = [...document.querySelectorAll("[data-metric]")].map((element) => ({ element, last: element.textContent }));

  let [shown, active] = [null, null];
  const at = (index) => `step ${steps[index]}` + (elapsed ? ` · ${duration(elapsed[index])}` : "");
  const show = (index, plot) => {
    if (index === shown && plot === active) return;
    [shown, active] = [index, plot];
    const hidden = index === null;
    for (const { element, last } of readouts)
      element.textContent = hidden ? last : number(metrics[element.dataset.metric][index]);
    for (const { element, place, cursor, line, dots, label } of plots) {
      cursor.style.display = hidden ? "none" : "";
      if (hidden) {
        label.textContent = "";
        continue;
      }
      const x = place.x[0] * steps[index] + place.x[1];
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
      const left = x < (place.box[0] + place.box[2]) / 2; // the label goes where there is room
      label.setAttribute("x", x + (left ? 6 : -6));
      label.setAttribute("text-anchor", left ? "start" : "end");
      label.textContent = element === active ? at(index) : "";
      for (const { dot, name } of dots) {
        const value = metrics[name][index];
        const visible = typeof value === "number" && !(place.logarithmic && value <= 0);
        dot.style.display = visible ? "" : "none";
        if (!visible) continue;
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", place.y[0] * (place.logarithmic ? Math.log10(value) : value) + place.y[1]);
      }
    }
  };

  const nearest = (step) => {
    let [low, high] = [0, steps.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };
  for (const { element, svg, place } of plots) {
    const point = (event) => {
      const { left, width } = svg.getBoundingClientRect();
      const x = ((event.clientX - left) / width) * svg.viewBox.baseVal.width;
      show(nearest((x - place.x[1]) / place.x[0]), element);
    };
    element.addEventListener("pointerdown", point);
    element.addEventListener("pointermove", point);
    element.addEventListener("pointerleave", () => show(null, null));
    element.addEventListener("blur", () => show(null, null));
    element.addEventListener("keydown", (event) => {
      const last = steps.length - 1;
      const from = shown ?? last;
      const to = { ArrowLeft: Math.max(0, from - 1), ArrowRight: Math.min(last, from + 1), Home: 0, End: last, Escape: null };
      if (!(event.key in to)) return;
      event.preventDefault();
      show(to[event.key], element);
      const values = [...element.closest("figure").querySelectorAll(".legend li")];
      spoken.textContent = shown === null ? "" : `${at(shown)}: ${values.map((item) => item.innerText).join(", ")}`;
    });
  }
})();
