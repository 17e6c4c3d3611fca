"use strict";
// Draws the charts, moves a cursor over them by pointer or arrow keys, and filters what the search names.
(() => {
  const charts = [];
  const shown = (value) =>
    value === null || value === undefined ? "not a number" : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));

  const along = (spec, axis) => {
    if (!spec.layer) return spec; // bars
    const title = axis === "time" ? spec.usermeta.time : axis;
    return { ...spec, encoding: { ...spec.encoding, x: { ...spec.encoding.x, field: axis, title } } };
  };

  const embed = async (chart, columns) => {
    const { spec, element, axis } = chart;
    const config = { ...spec.config, legend: { ...spec.config.legend, columns } };
    const options = { renderer: "svg", actions: false, ast: true, defaultStyle: false };
    chart.drawn?.finalize(); // else it goes on to listen to the window
    chart.drawn = await vegaEmbed(element.firstElementChild, { ...along(spec, axis), config }, options);
  };
  const cut = (element) => {
    const [legend, svg] = [".role-legend", "svg"].map((name) => element.querySelector(name)?.getBoundingClientRect());
    return legend && legend.right > svg.right;
  };

  const draw = async (chart, axis) => {
    const { spec, element } = chart;
    const known = !spec.layer || spec.data.values.some((row) => row[axis] !== undefined);
    chart.axis = known ? axis : "step";
    let columns = Math.max(1, Math.floor(element.clientWidth / 150));
    await embed(chart, columns);
    while (columns > 1 && cut(element)) await embed(chart, (columns -= 1));
    chart.view = chart.drawn.view;
    if (!chart.cursor) {
      chart.cursor = document.createElement("div");
      chart.cursor.className = "cursor";
      element.append(chart.cursor);
    }
  };

  // ---- the cursor ----
  const point = (chart, value) => {
    const nearest = new Map();
    for (const row of chart.spec.data.values) {
      if (row[chart.axis] === undefined || (row.faint && chart.strong)) continue;
      const best = nearest.get(row.line);
      if (!best || Math.abs(row[chart.axis] - value) < Math.abs(best[chart.axis] - value)) nearest.set(row.line, row);
    }
    const rows = [...nearest.values()];
    if (!rows.length) return;
    chart.value = value;
    const closest = rows.reduce((a, b) => (Math.abs(b[chart.axis] - value) < Math.abs(a[chart.axis] - value) ? b : a));
    const where = chart.axis === "time" ? `${shown(closest.time)} ${chart.spec.usermeta.time}, step ${closest.step}` : `step ${closest.step.toLocaleString("en")}`;
    const one = rows.map((row) => {
      const band = row.low === undefined || row.low === null ? "" : ` (${shown(row.low)} to ${shown(row.high)})`;
      return `${rows.length > 1 ? `${row.line} ` : ""}${shown(row.value)}${band}`;
    });
    chart.readout.textContent = `${where}: ${one.join(" · ")}`;
    const [left, top] = chart.view.origin();
    const x = chart.view.scale("x")(closest[chart.axis]);
    Object.assign(chart.cursor.style, { display: "block", left: `${left + x}px`, top: `${top}px`, height: `${chart.view.height()}px` });
  };
  const leave = (chart) => {
    chart.readout.textContent = "";
    chart.cursor.style.display = "none";
  };

  for (const figure of document.querySelectorAll("figure")) {
    const data = figure.querySelector('script[type="application/json"]');
    if (!data) continue;
    const spec = JSON.parse(data.textContent);
    const chart = { spec, element: figure.querySelector(".chart"), readout: figure.querySelector(".readout") };
    charts.push(chart);
    if (!spec.layer) continue;
    chart.strong = spec.data.values.some((row) => !row.faint);
    chart.element.addEventListener("pointermove", (event) => {
      const [left] = chart.view.origin();
      point(chart, chart.view.scale("x").invert(event.clientX - chart.element.getBoundingClientRect().left - left));
    });
    chart.element.addEventListener("pointerleave", () => leave(chart));
    chart.element.addEventListener("blur", () => leave(chart));
    chart.element.addEventListener("keydown", (event) => {
      const [first, last] = chart.view.scale("x").domain();
      const from = chart.value === undefined ? first : chart.value;
      const to = { ArrowLeft: from - (last - first) / 50, ArrowRight: from + (last - first) / 50, Home: first, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      point(chart, Math.min(last, Math.max(first, to)));
    });
  }

  const drawAll = async (axis) => {
    for (const chart of charts) await draw(chart, axis);
    document.documentElement.dataset.drawn = axis;
  };
  for (const choice of document.querySelectorAll('input[name="axis"]')) choice.addEventListener("change", () => drawAll(choice.value));
  drawAll("step");
  let width = innerWidth; // of the window for which the legends have their columns: a turned phone has another
  let settled;
  addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(() => {
      if (innerWidth === width) return; // a phone's address bar came or went
      width = innerWidth;
      drawAll(document.querySelector('input[name="axis"]:checked').value);
    }, 150);
  });

  // ---- the search ----
  const search = document.getElementById("search");
  const found = document.getElementById("found");
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    let count = 0;
    for (const each of document.querySelectorAll("article.searchable, table.searchable tbody tr")) {
      each.hidden = wanted !== "" && !each.textContent.toLowerCase().includes(wanted);
      if (!each.hidden) count += 1;
    }
    found.textContent = wanted === "" ? "" : `${count} found`;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && document.activeElement === search) {
      search.value = "";
      search.dispatchEvent(new Event("input"));
    }
  });
})();
