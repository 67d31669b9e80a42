// Photos as buttons. props.value = {label, empty, items: [{key, name, picture, note, kind, current}]}.
// Choosing one triggers 'select' with its key. Tiles are kept and changed in place: nothing flickers, focus stays.
const box = element.querySelector('.tiles');
const known = new Map();

function make(item) {
  const tile = document.createElement('button'), image = document.createElement('img');
  tile.type = 'button';
  tile.onclick = () => trigger('select', {key: item.key});
  tile.append(image, document.createElement('span'));
  return tile;
}

function update(tile, item) {
  const [image, caption] = tile.children;
  if (image.getAttribute('src') !== item.picture) image.src = item.picture;
  image.alt = '';
  caption.textContent = item.note;
  tile.dataset.kind = item.kind;
  tile.title = item.name;
  tile.setAttribute('aria-label', `${item.name}: ${item.note}`);
  tile.setAttribute('aria-pressed', String(item.current));
}

function show() {
  const {items, empty, label} = props.value ?? {items: [], empty: '', label: ''};
  box.setAttribute('aria-label', label);
  const keys = new Set(items.map((item) => item.key));
  for (const [key, tile] of known) if (!keys.has(key)) { tile.remove(); known.delete(key); }
  items.forEach((item, index) => {
    if (!known.has(item.key)) known.set(item.key, make(item));
    const tile = known.get(item.key);
    update(tile, item);
    if (box.children[index] !== tile) box.insertBefore(tile, box.children[index] ?? null);
  });
  box.dataset.empty = items.length ? '' : empty;
}

watch('value', show);
show();
