// Numbers as people read them.

const counted = (number) => Math.round(number).toLocaleString("en-US");

/** A share of a whole that is 100 or 0 only where it is all or nothing. */
function percentOf(part, whole) {
  if (!whole) return "";
  const text = ((100 * part) / whole).toFixed(1);
  if (text === "100.0" && part < whole) return "99.9+ %";
  return text === "0.0" && part > 0 ? "<0.1 %" : `${text} %`;
}

function several(count, what) {
  return `${counted(count)} ${what}${count === 1 ? "" : "s"}`;
}

/** Seconds with as many digits as an interval needs. */
function seconds(value) {
  return `${Number(value.toFixed(3)).toLocaleString("en", { maximumFractionDigits: 3 })} s`;
}

function range({ begin, end }) {
  return `${seconds(begin)} to ${seconds(end)}`;
}
