// After a search Sphinx marks the words that were searched for, and fails at the titles of the theme's icons, which are
// text inside an SVG and have no box of their own. The buttons carry labels: the titles are not needed.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("svg symbol > title").forEach((title) => title.remove());
});
