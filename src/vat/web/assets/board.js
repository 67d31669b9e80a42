// Two photos and the points that belong together. The server sends where a grid of points of the first photo lies in
// the second one; everything between is interpolated here, so that a point follows the pointer without delay.
//
// props.value = {first: {photo, width, height}, second: {...}, warp, across, down, x, y, confidence, colours,
// hint}; x, y and confidence are lists of across * down numbers by rows.
const find = (selector) => element.querySelector(selector);
const left = find('.first'), right = find('.second'), warp = find('.warp'), blend = find('.blend input');
const canvases = [left, right].map((side) => side.querySelector('canvas'));
const MOST_POINTS = 40, SPREAD = 5, LEAST_SURE = 0.35;
let given = null, points = [], hover = null, images = [null, null];

function sample(values, point) {  // bilinear, between the centres of the grid's cells
  const {across, down, first} = given;
  const limit = (value, most) => Math.min(most - 1, Math.max(0, value));
  const gx = limit((point.x + 0.5) / first.width * across - 0.5, across);
  const gy = limit((point.y + 0.5) / first.height * down - 0.5, down);
  const x0 = Math.floor(gx), y0 = Math.floor(gy), x1 = limit(x0 + 1, across), y1 = limit(y0 + 1, down);
  const mix = (a, b, share) => a + (b - a) * share;
  const row = (y) => mix(values[y * across + x0], values[y * across + x1], gx - x0);
  return mix(row(y0), row(y1), gy - y0);
}

function matchOf(point) {
  return {x: sample(given.x, point), y: sample(given.y, point), sure: sample(given.confidence, point)};
}

function percent(sure) {
  return `${Math.round(100 * sure)} %`;
}

// -- drawing ----------------------------------------------------------------------------------------------------

function mark(context, at, colour, text, solid) {
  const scale = Math.max(context.canvas.width, context.canvas.height) / 500, r = 7 * scale;
  context.lineWidth = 2.5 * scale;
  context.setLineDash(solid ? [] : [3 * scale, 3 * scale]);
  context.beginPath();
  context.arc(at.x, at.y, r, 0, 2 * Math.PI);
  context.fillStyle = solid ? colour : colour + '66';
  context.fill();
  context.strokeStyle = '#ffffff';
  context.stroke();
  context.setLineDash([]);
  if (!text) return;
  context.font = `600 ${15 * scale}px system-ui, sans-serif`;
  const wide = context.measureText(text).width, flip = at.x + r + wide + 12 * scale > context.canvas.width;
  const x = flip ? at.x - r - wide - 6 * scale : at.x + r + 6 * scale;
  context.fillStyle = '#000000b8';
  context.fillRect(x - 4 * scale, at.y - 10 * scale, wide + 8 * scale, 20 * scale);
  context.fillStyle = '#ffffff';
  context.textBaseline = 'middle';
  context.fillText(text, x, at.y);
}

function draw() {
  if (!given) return;
  const contexts = canvases.map((canvas) => canvas.getContext('2d'));
  contexts.forEach((context, side) => {
    context.clearRect(0, 0, context.canvas.width, context.canvas.height);
    context.globalAlpha = side ? 1 - blend.value / 100 : 1;
    if (images[side]) context.drawImage(images[side], 0, 0, context.canvas.width, context.canvas.height);
    context.globalAlpha = 1;
  });
  points.forEach((point, index) => pair(contexts, point, given.colours[index % given.colours.length], String(index + 1)));
  if (hover) pair(contexts, hover, '#111111', '');
}

function pair(contexts, point, colour, number) {
  const match = matchOf(point), solid = match.sure >= LEAST_SURE;
  mark(contexts[0], point, colour, number, true);
  mark(contexts[1], match, colour, number ? `${number}: ${percent(match.sure)}` : percent(match.sure), solid);
}

function list() {
  find('.list').replaceChildren(...points.map((point, index) => {
    const line = document.createElement('li'), dot = document.createElement('i'), match = matchOf(point);
    dot.style.background = given.colours[index % given.colours.length];
    const words = match.sure >= LEAST_SURE ? '' : ', unsure';
    line.append(dot, `(${point.x.toFixed(0)}, ${point.y.toFixed(0)}) → (${match.x.toFixed(0)}, ${match.y.toFixed(0)}), `
      + `confidence ${percent(match.sure)}${words}`);
    return line;
  }));
  draw();
}

// -- points -----------------------------------------------------------------------------------------------------

function place(event) {
  const area = left.getBoundingClientRect(), {width, height} = given.first;
  return inside({x: (event.clientX - area.left) * width / area.width, y: (event.clientY - area.top) * height / area.height});
}

function inside(at) {
  return {x: Math.min(given.first.width - 1, Math.max(0, at.x)), y: Math.min(given.first.height - 1, Math.max(0, at.y))};
}

function add(at) {
  if (points.length < MOST_POINTS) points.push(at);
  hover = null;
  list();
}

function spread() {
  const {width, height} = given.first;
  points = [];
  for (let i = 0; i < SPREAD * SPREAD; i++) {
    points.push({x: width * (0.5 + i % SPREAD) / SPREAD, y: height * (0.5 + Math.floor(i / SPREAD)) / SPREAD});
  }
  points = points.filter((point) => matchOf(point).sure >= LEAST_SURE);
  list();
}

left.addEventListener('click', (event) => { if (given) add(place(event)); });
left.addEventListener('pointermove', (event) => {
  if (given && event.pointerType !== 'touch') { hover = place(event); draw(); }
});
left.addEventListener('pointerleave', () => { hover = null; draw(); });
left.addEventListener('keydown', (event) => {
  const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  if (!given) return;
  if (moves[event.key]) {
    const from = hover ?? {x: given.first.width / 2, y: given.first.height / 2}, step = event.shiftKey ? 1 : given.first.width / 50;
    hover = inside({x: from.x + moves[event.key][0] * step, y: from.y + moves[event.key][1] * step});
    draw();
  } else if ((event.key === 'Enter' || event.key === ' ') && hover) {
    const at = hover;
    add(at);
    hover = {...at};
  } else if (event.key === 'Backspace') {
    points.pop();
    list();
  } else {
    return;
  }
  event.preventDefault();
});

const ACTIONS = {spread, undo: () => { points.pop(); list(); }, clear: () => { points = []; list(); }};
for (const button of element.querySelectorAll('[data-do]')) button.onclick = () => { if (given) ACTIONS[button.dataset.do](); };
blend.addEventListener('input', draw);

// -- a pair arrives ---------------------------------------------------------------------------------------------

function show() {
  const value = props.value;
  find('.hint').textContent = value?.hint ?? '';
  given = value?.first && value?.second ? value : null;
  element.firstElementChild.dataset.empty = given ? 'no' : 'yes';
  points = []; hover = null; images = [null, null];
  if (!given) return;
  [given.first, given.second].forEach((side, index) => {
    Object.assign(canvases[index], {width: side.width, height: side.height});
    canvases[index].parentElement.style.setProperty('--shape', side.width / side.height);
    const image = new Image();
    image.onload = () => { images[index] = image; draw(); };
    image.src = side.photo;
  });
  warp.src = given.warp;
  blend.value = 0;
  list();
}

watch('value', show);
show();
