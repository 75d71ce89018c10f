// Names and focus that assistive technology needs and the theme leaves out.
function label() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
  for (const code of document.querySelectorAll("pre > code:not([tabindex])"))
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
}
document.addEventListener("DOMContentLoaded", () => {
  label();
  addEventListener("resize", label);
  new MutationObserver(label).observe(document.body, { childList: true, subtree: true });
});
