// Tables inside an element of the class `sortable`: a click on a column heading, or Enter, sorts by this column.
// A second click reverses the order.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const valueOf = (row, column) => row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [parseFloat(a), parseFloat(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a.localeCompare(b);
    // Larger values come first.
    return y - x;
  };
  document.querySelectorAll(".sortable table").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      const sort = () => {
        const way = head.ariaSort === "descending" ? "ascending" : "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.ariaSort = way;
        const sign = way === "descending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => sign * compare(valueOf(a, column), valueOf(b, column)));
        table.tBodies[0].append(...rows);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  });
});
