// A wide table scrolls in a box of its own, which the theme makes after the page is there: the keyboard has to reach it.
const reach = () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => {
  box.tabIndex = 0
})
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true })
reach()
document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
