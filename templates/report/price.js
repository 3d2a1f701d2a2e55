(() => {
  const price = document.getElementById("price"), gpus = document.getElementById("gpus");
  const show = () => {
    const hourly = price.valueAsNumber * gpus.valueAsNumber;
    for (const cell of document.querySelectorAll("[data-rate]")) {
      const cost = hourly / 3600 / Number(cell.dataset.rate) * 1e6;
      cell.textContent = Number.isFinite(cost) ? `${cost < 0.1 ? cost.toPrecision(2) : cost.toFixed(2)} USD` : "-";
    }
  };
  price.addEventListener("input", show);
  gpus.addEventListener("input", show);
  document.getElementById("ask-price").hidden = false;
})();
