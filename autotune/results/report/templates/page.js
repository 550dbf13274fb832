(function () {
  "use strict";
  var $ = function (q, root) { return Array.prototype.slice.call((root || document).querySelectorAll(q)); };
  var one = function (q) { return document.querySelector(q); };
  var told = one("#told");
  var tell = function (text) { if (told) { told.textContent = ""; told.textContent = text; } };
  document.documentElement.classList.add("js");

  // theme
  var dark = function () {
    var set = document.documentElement.dataset.theme;
    return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  var themeButton = one("#theme");
  if (themeButton) themeButton.addEventListener("click", function () {
    var next = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("autotune-theme", next); } catch (e) { /* a file from a mail may have no storage */ }
  });

  // copying
  var select = function (element) {
    var range = document.createRange();
    range.selectNodeContents(element);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };
  $("button.copy").forEach(function (button) {
    button.addEventListener("click", function () {
      var code = document.getElementById(button.dataset.copy), text = code.textContent;
      var done = function () { button.textContent = "copied"; tell("copied"); setTimeout(function () { button.textContent = "copy"; }, 1500); };
      var failed = function () { select(code); tell("selected: press Ctrl-C to copy"); button.textContent = "selected"; };
      if (navigator.clipboard && window.isSecureContext) navigator.clipboard.writeText(text).then(done, failed);
      else { select(code); try { document.execCommand("copy") ? done() : failed(); } catch (e) { failed(); } }
    });
  });

  // sorting
  var number = function (row, at) {
    var cell = row.cells[at], key = cell.dataset.k !== undefined ? cell.dataset.k : cell.textContent;
    if (key === "" || key === "–" || key[0] === "(") return null;  // how much was missing is no peak
    var size = /^([\d.]+) (B|KiB|MiB|GiB)(?= \(|$)/.exec(key), time = /^([\d.]+) (ms|s)$/.exec(key), long = /^(?:(\d+)h)?(\d+)m(?:(\d+)s)?$/.exec(key);
    if (size) return size[1] * { B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824 }[size[2]];
    if (time) return time[1] * (time[2] === "s" ? 1 : 0.001);
    if (long) return 3600 * (long[1] || 0) + 60 * long[2] + Number(long[3] || 0);
    return isNaN(Number(key)) ? key.toLowerCase() : Number(key);
  };
  $("table.sortable").forEach(function (table) {
    $("thead th", table).forEach(function (head, at) {
      var button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") === "ascending";
        var body = table.tBodies[0];
        var rows = Array.prototype.map.call(body.rows, function (row) { return [number(row, at), row]; });
        rows.sort(function (a, b) {
          a = a[0]; b = b[0];
          if (a === null || b === null) return (a === null) - (b === null);
          var order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
          return down ? -order : order;
        });
        $("th", table).forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        var all = document.createDocumentFragment();
        rows.forEach(function (pair) { all.appendChild(pair[1]); });
        body.appendChild(all);
        tell("sorted by " + button.textContent + (down ? ", descending" : ", ascending"));
      });
    });
  });

  // filtering: one set of toggles for the table and the chart
  var rows = $("#trials-table tbody tr"), marks = $("svg [data-t]");
  var rowOf = {};
  rows.forEach(function (row) { rowOf[row.dataset.t] = row; });
  var filters = one("#filters");
  var filter = function () {
    var words = one("#search").value.toLowerCase().split(/\s+/).filter(Boolean);
    var hidden = {}, shown = 0;
    $("#filters input[type=checkbox]").forEach(function (box) { if (!box.checked) hidden[box.value] = true; });
    rows.forEach(function (row) {
      var text = row.textContent.toLowerCase();
      var out = hidden["s:" + row.dataset.s] || hidden["z:" + row.dataset.z] ||
        words.some(function (word) { return text.indexOf(word) < 0; });
      row.hidden = !!out;
      if (!out) shown += 1;
    });
    marks.forEach(function (mark) {
      var row = rowOf[mark.dataset.t];
      mark.classList.toggle("out", !!(row && row.hidden));
    });
    one("#count").textContent = shown === rows.length ? rows.length + " trials" : shown + " of " + rows.length + " trials";
  };
  if (filters) {
    filters.addEventListener("input", filter);
    filters.addEventListener("reset", function () { setTimeout(filter, 0); });
  }

  // taking the data away
  var stored = one("#data"), data = null;
  var read = function () { if (!data) data = JSON.parse(stored.textContent); return data; };
  var save = function (text, name, type) {
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: type }));
    link.download = name;
    document.body.appendChild(link);
    link.click();
    link.remove();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 10000);
  };
  var field = function (value) {
    if (value === null || value === undefined) return "";
    var text = typeof value === "string" ? value : JSON.stringify(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;  // a spreadsheet would run it
    return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  };
  var csv = function () {
    return [read().columns].concat(read().trials).map(function (row) { return row.map(field).join(","); }).join("\r\n") + "\r\n";
  };
  var file = function () { return String(read().study).replace(/[^\w.-]+/g, "_") || "study"; };
  if (one("#save-json")) one("#save-json").addEventListener("click", function () {
    save(JSON.stringify(read(), null, 1), file() + ".json", "application/json");
  });
  if (one("#save-csv")) one("#save-csv").addEventListener("click", function () { save(csv(), file() + ".csv", "text/csv"); });

  // paper has no buttons: what is folded is unfolded
  var folded = [];
  addEventListener("beforeprint", function () { folded = $("details:not([open])"); folded.forEach(function (d) { d.open = true; }); });
  addEventListener("afterprint", function () { folded.forEach(function (d) { d.open = false; }); });
})();
