"use strict";
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll(".chart")].map((place) => ({
    place, spec: JSON.parse(place.nextElementSibling.textContent), width: 0 }));

  const names = (spec) => [spec, ...(spec.layer || [])].flatMap((part) => part.encoding?.color?.scale?.domain || []);

  function look(width, spec) {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const narrow = width < 600;
    const longest = Math.max(1, ...names(spec).map((name) => String(name).length));
    const columns = Math.max(1, Math.min(5, Math.floor(width / (30 + 7 * longest))));
    const axis = { labelColor: of("--ink"), titleColor: of("--soft"), gridColor: of("--line"), domainColor: of("--soft"),
      tickColor: of("--soft"), titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12, labelLimit: narrow ? 110 : 220 };
    return { background: "transparent", font: "system-ui, sans-serif", axis, view: { stroke: null },
      line: { strokeWidth: 2 }, axisQuantitative: { tickCount: narrow ? 5 : 8 },
      legend: { labelColor: of("--ink"), titleColor: of("--soft"), orient: "bottom", labelFontSize: 12, titleFontSize: 12, columns: narrow ? 1 : columns,
        labelLimit: 260, symbolLimit: 60, symbolOpacity: 1, gradientLength: Math.min(240, width - 60) } };
  }

  // Reduce the columns of a faceted chart to the width of the page. The space between two columns is 20 pixels.
  function fitted(spec, width) {
    if (!spec.columns) return spec;
    const most = Math.floor((width + 10) / (spec.spec.width + 20));
    return { ...spec, columns: Math.max(1, Math.min(spec.columns, most)) };
  }

  function draw(chart) {
    const width = chart.place.clientWidth;
    if (!width || (width === chart.width && dark.matches === chart.dark)) return;
    chart.width = width;
    chart.dark = dark.matches;
    vegaEmbed(chart.place, fitted(chart.spec, width), { actions: false, renderer: "svg", config: look(width, chart.spec) });
  }

  const all = () => charts.forEach(draw);
  dark.addEventListener("change", all);
  addEventListener("resize", all);
  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", all));
  all();

  document.querySelectorAll(".code").forEach((code) => {
    const button = code.querySelector("button");
    button.addEventListener("click", async () => {
      const text = code.querySelector("pre");
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(text);
        button.textContent = "selected: copy with Ctrl-C";
      }
    });
  });
})();
