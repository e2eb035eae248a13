const tip = document.getElementById('tip');
document.addEventListener('pointermove', e => {
  const on = e.target.closest && e.target.closest('[data-tip]');
  tip.hidden = !on;
  if (!on) return;
  tip.textContent = on.dataset.tip;
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - w - 6)) + 'px';
  tip.style.top = (e.clientY + 18 + h > innerHeight ? e.clientY - h - 10 : e.clientY + 18) + 'px';
});
