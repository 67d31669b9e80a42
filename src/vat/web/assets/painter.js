// The easel: a photo, a label map over it, and brush, eraser and box to change it. By mouse, pen, finger or keyboard.
//
// From the server: props.value = {key, photo, width, height, runs, classes, colours, hint}.
// To the server:   props.value = {key, classes, runs, touched}. Runs are [label, length, label, length, ...] by rows.
const find = (selector) => element.querySelector(selector);
const stage = find('.stage'), photo = find('canvas.photo'), mask = find('canvas.mask');
const cursor = find('.cursor'), frame = find('.frame'), chips = find('.chips');
const sizeInput = find('.size input'), nameInput = find('.rename input');
const DEEPEST_UNDO = 60, MOST_CLASSES = 8, OPACITY = 130;

let key = null, width = 1, height = 1, labels = new Uint8Array(1), touched = false;
let classes = ['object'], colours = ['#f23d6b'], chosen = 1, tool = 'brush';
let past = [], future = [], stroke = null, spot = null, corner = null;

function toRuns(values) {
  const runs = [];
  for (let i = 0, start = 0; i <= values.length; i++) {
    if (i === values.length || values[i] !== values[start]) { runs.push(values[start], i - start); start = i; }
  }
  return runs;
}

function fromRuns(runs, length) {
  const values = new Uint8Array(length);
  for (let i = 0, at = 0; i + 1 < runs.length; i += 2) { values.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return values;
}

// -- drawing ----------------------------------------------------------------------------------------------------

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function redraw(left = 0, top = 0, right = width, bottom = height) {
  left = Math.max(0, Math.floor(left)); top = Math.max(0, Math.floor(top));
  right = Math.min(width, Math.ceil(right)); bottom = Math.min(height, Math.ceil(bottom));
  if (right <= left || bottom <= top) return;
  const area = new ImageData(right - left, bottom - top), palette = colours.map(rgb);
  for (let y = top, to = 0; y < bottom; y++) {
    for (let x = left; x < right; x++, to += 4) {
      const label = labels[y * width + x];
      if (!label) continue;
      area.data.set(palette[(label - 1) % palette.length], to);
      area.data[to + 3] = OPACITY;
    }
  }
  mask.getContext('2d').putImageData(area, left, top);
}

function radius() {  // in pixels of the photo; the slider is in thousandths of its longer side, times two
  return Math.max(1, sizeInput.value * Math.max(width, height) / 500);
}

function dab(x, y, label) {
  const r = radius(), low = Math.max(0, Math.ceil(y - r)), high = Math.min(height - 1, Math.floor(y + r));
  for (let row = low; row <= high; row++) {
    const half = Math.sqrt(r * r - (row - y) ** 2);
    const from = Math.max(0, Math.ceil(x - half)), to = Math.min(width - 1, Math.floor(x + half));
    if (to >= from) labels.fill(label, row * width + from, row * width + to + 1);
  }
}

function drawLine(from, to, label) {
  const steps = Math.max(1, Math.ceil(Math.hypot(to.x - from.x, to.y - from.y) / (radius() / 3)));
  for (let i = 0; i <= steps; i++) dab(from.x + (to.x - from.x) * i / steps, from.y + (to.y - from.y) * i / steps, label);
  const r = radius() + 1;
  redraw(Math.min(from.x, to.x) - r, Math.min(from.y, to.y) - r, Math.max(from.x, to.x) + r, Math.max(from.y, to.y) + r);
}

function fillBox(a, b) {
  const limit = (value, most) => Math.min(most, Math.max(0, Math.round(value)));
  const left = limit(Math.min(a.x, b.x), width), right = limit(Math.max(a.x, b.x), width);
  for (let y = limit(Math.min(a.y, b.y), height); y < limit(Math.max(a.y, b.y), height); y++) {
    labels.fill(chosen, y * width + left, y * width + right);
  }
  redraw();
}

// -- what the server hears --------------------------------------------------------------------------------------

function report() {
  props.value = {key, classes, runs: touched ? toRuns(labels) : [], touched};
}

function remember() {
  past.push(toRuns(labels));
  if (past.length > DEEPEST_UNDO) past.shift();
  future = [];
}

function finish() {
  touched = true;
  buttons();
  report();
}

function travel(from, to) {
  if (!from.length) return;
  to.push(toRuns(labels));
  labels = fromRuns(from.pop(), width * height);
  redraw();
  finish();
}

// -- strokes ----------------------------------------------------------------------------------------------------

function place(event) {
  const area = stage.getBoundingClientRect();
  return {x: (event.clientX - area.left) * width / area.width, y: (event.clientY - area.top) * height / area.height};
}

function begin(at) {
  if (key === null) return;
  remember();
  stroke = {start: at, last: at};
  if (tool !== 'box') drawLine(at, at, tool === 'brush' ? chosen : 0);
}

function advance(at) {
  if (tool !== 'box') drawLine(stroke.last, at, tool === 'brush' ? chosen : 0);
  else showFrame(stroke.start, at);
  stroke.last = at;
}

function end() {
  if (!stroke) return;
  if (tool === 'box') fillBox(stroke.start, stroke.last);
  stroke = null;
  frame.hidden = true;
  finish();
}

function put(node, left, top, wide, high) {
  Object.assign(node.style, {
    left: `${100 * left / width}%`, top: `${100 * top / height}%`,
    width: `${100 * wide / width}%`, height: `${100 * high / height}%`,
  });
  node.hidden = false;
}

function showFrame(a, b) {
  put(frame, Math.min(a.x, b.x), Math.min(a.y, b.y), Math.abs(a.x - b.x), Math.abs(a.y - b.y));
}

function showCursor(at) {
  spot = at;
  const r = tool === 'box' ? Math.max(width, height) / 120 : radius();
  put(cursor, at.x - r, at.y - r, 2 * r, 2 * r);
}

stage.addEventListener('pointerdown', (event) => {
  if (event.button) return;
  event.preventDefault();
  stage.focus({preventScroll: true});
  stage.setPointerCapture(event.pointerId);
  begin(place(event));
});
stage.addEventListener('pointermove', (event) => {
  if (key === null) return;
  for (const step of event.getCoalescedEvents?.() ?? []) if (stroke) advance(place(step));
  if (stroke) advance(place(event));
  showCursor(place(event));
});
stage.addEventListener('pointerup', end);
stage.addEventListener('pointercancel', end);
stage.addEventListener('pointerleave', () => { if (!stroke) cursor.hidden = true; });

// -- keyboard ---------------------------------------------------------------------------------------------------

function stamp() {
  if (tool !== 'box') { begin(spot); end(); return; }
  if (!corner) { corner = spot; showFrame(spot, spot); return; }
  begin(corner); stroke.last = spot; corner = null; end();
}

function move(dx, dy, fine) {
  const step = fine ? 1 : Math.max(2, radius() / 2);
  const from = spot ?? {x: width / 2, y: height / 2};
  showCursor({x: Math.min(width, Math.max(0, from.x + dx * step)), y: Math.min(height, Math.max(0, from.y + dy * step))});
  if (corner) showFrame(corner, spot);
}

const KEYS = {
  ArrowLeft: (e) => move(-1, 0, e.shiftKey), ArrowRight: (e) => move(1, 0, e.shiftKey),
  ArrowUp: (e) => move(0, -1, e.shiftKey), ArrowDown: (e) => move(0, 1, e.shiftKey),
  ' ': () => { if (!spot) move(0, 0); stamp(); }, Enter: () => { if (!spot) move(0, 0); stamp(); },
  b: () => pickTool('brush'), e: () => pickTool('eraser'), r: () => pickTool('box'),
  '[': () => resize(-3), ']': () => resize(3),
};

stage.addEventListener('keydown', (event) => {
  if (key === null) return;
  if (event.ctrlKey || event.metaKey) {
    if (event.key.toLowerCase() !== 'z') return;
    event.shiftKey ? travel(future, past) : travel(past, future);
  } else if (/^[1-9]$/.test(event.key)) {
    if (event.key <= classes.length) pickClass(Number(event.key));
  } else if (KEYS[event.key] ?? KEYS[event.key.toLowerCase()]) {  // letters with Caps Lock too
    (KEYS[event.key] ?? KEYS[event.key.toLowerCase()])(event);
  } else {
    return;
  }
  event.preventDefault();
});

// -- tools and classes ------------------------------------------------------------------------------------------

function resize(by) {
  sizeInput.value = Number(sizeInput.value) + by;
  if (spot) showCursor(spot);
}

function pickTool(name) {
  tool = name;
  corner = null;
  frame.hidden = true;
  for (const button of element.querySelectorAll('[data-tool]')) {
    button.setAttribute('aria-checked', String(button.dataset.tool === name));
  }
  if (spot && !cursor.hidden) showCursor(spot);
}

function pickClass(number) {
  chosen = number;
  if (tool === 'eraser') pickTool('brush');
  drawChips();
}

function drawChips() {
  chips.replaceChildren(...classes.map((name, index) => {
    const chip = document.createElement('button'), dot = document.createElement('i');
    chip.type = 'button';
    chip.setAttribute('role', 'radio');
    chip.setAttribute('aria-checked', String(index + 1 === chosen));
    chip.title = `Paint ${name} (${index + 1})`;
    dot.style.background = colours[index % colours.length];
    chip.append(dot, name);
    chip.onclick = () => pickClass(index + 1);
    return chip;
  }));
  nameInput.value = classes[chosen - 1];
  stage.style.setProperty('--chosen', colours[(chosen - 1) % colours.length]);
  find('[data-do=add]').disabled = classes.length >= MOST_CLASSES;
}

function buttons() {
  find('[data-do=undo]').disabled = !past.length;
  find('[data-do=redo]').disabled = !future.length;
  find('[data-do=clear]').disabled = key === null;
}

const ACTIONS = {
  undo: () => travel(past, future),
  redo: () => travel(future, past),
  clear: () => { remember(); labels.fill(0); redraw(); finish(); },
  add: () => {
    classes = [...classes, `class ${classes.length + 1}`];
    pickClass(classes.length);
    report();
    nameInput.focus();
    nameInput.select();
  },
};

for (const button of element.querySelectorAll('[data-do]')) button.onclick = () => ACTIONS[button.dataset.do]();
for (const button of element.querySelectorAll('[data-tool]')) button.onclick = () => pickTool(button.dataset.tool);
nameInput.addEventListener('change', () => {
  classes = classes.map((name, index) => index + 1 === chosen ? nameInput.value.trim() || name : name);
  drawChips();
  report();
});
sizeInput.addEventListener('input', () => { if (!cursor.hidden && spot) showCursor(spot); });

// -- a photo arrives --------------------------------------------------------------------------------------------

function show() {
  const given = props.value;
  if (!given || !('photo' in given)) return;  // what this easel sent itself
  const same = given.key === key;
  key = given.key;
  ({classes, colours} = given);
  chosen = Math.min(chosen, classes.length);
  find('.hint').textContent = given.hint;
  element.firstElementChild.dataset.empty = key === null ? 'yes' : 'no';
  touched = false;
  stroke = spot = corner = null;
  cursor.hidden = frame.hidden = true;
  if (!same) past = future = [];
  past = [...past]; future = [...future];
  if (key !== null) open(given);
  drawChips();
  buttons();
  report();  // so that the photo itself is not sent back with every click
  if (given.reveal) element.firstElementChild.scrollIntoView({block: 'nearest', behavior: 'smooth'});
}

function open(given) {
  ({width, height} = given);
  labels = given.runs.length ? fromRuns(given.runs, width * height) : new Uint8Array(width * height);
  for (const canvas of [photo, mask]) Object.assign(canvas, {width, height});
  stage.style.setProperty('--shape', width / height);
  const image = new Image();
  image.onload = () => { if (given.key === key) photo.getContext('2d').drawImage(image, 0, 0, width, height); };
  image.src = given.photo;
  redraw();
}

watch('value', show);
show();
