"use strict";
// What textual.js, which draws the terminal, leaves out: the address of this very page, and the focus.
(() => {
  const terminal = document.getElementById("terminal");
  terminal.dataset.sessionWebsocketUrl = `${location.protocol === "https:" ? "wss:" : "ws:"}//${location.host}/ws`;
  const focus = () => {
    const input = terminal.querySelector(".xterm-helper-textarea");
    if (input && document.activeElement !== input && !document.body.classList.contains("-closed")) input.focus();
  };
  new MutationObserver(focus).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  for (const event of ["focus", "pageshow"]) window.addEventListener(event, focus);
  document.addEventListener("pointerup", focus);
  document.getElementById("restart").addEventListener("click", () => location.reload());
})();
