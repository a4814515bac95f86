// Small helpers for text and elements. Nothing here, or anywhere, writes HTML from data.

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  return size >= 1 || size === 0 ? `${value.toFixed(1)} s` : `${value.toFixed(2)} s`;
};

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export const clock = (mesh, scale) => new Date((1000 * mesh) / scale).toLocaleTimeString();

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "for" || key === "role" || key === "scope") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

// A table body kept in step with rows by key; only cells that changed are written.
export class Rows {
  constructor(body, make) {
    this.body = body;
    this.make = make; // () => {row, update(data)}
    this.known = new Map();
  }

  get size() {
    return this.known.size;
  }

  update(key, data, before = null) {
    let entry = this.known.get(key);
    if (!entry) {
      entry = this.make(key);
      this.known.set(key, entry);
      this.body.insertBefore(entry.row, before);
    }
    entry.update(data);
    return entry;
  }

  keepOnly(keys) {
    const wanted = new Set(keys);
    for (const key of [...this.known.keys()]) if (!wanted.has(key)) this.remove(key);
  }

  remove(key) {
    this.known.get(key)?.row.remove();
    this.known.delete(key);
  }
}
