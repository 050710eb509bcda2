// Light or dark as the system is, until the button says otherwise; remembered while the page is open.
const themeButton = document.querySelector("button.theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

function nameTheme() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
}

themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
prefersDark.addEventListener("change", nameTheme);
nameTheme();
