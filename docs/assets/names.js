// The theme gives its search dialog no name, which a screen reader would say.
document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
