// The table of energy: of the time that is shown, where that is not the whole.

class EnergyTable {
  constructor(view, described, table, section) {
    [this.view, this.data, this.table, this.section] = [view, described, table, section];
    this.at = Object.fromEntries(table.columns.map(({ name }, index) => [name, index]));
    view.on(() => this.show());
  }

  /** The sum of a row's values in the time that is shown; of spans at its ends in proportion. */
  sum(values, row) {
    const { bins } = this.data, { begin, end, ns } = this.view;
    const low = (begin / ns) * bins, high = (end / ns) * bins;
    let found = 0;
    for (let bin = Math.floor(low); bin < Math.min(Math.ceil(high), bins); bin++)
      found += values[row * bins + bin] * (Math.min(bin + 1, high) - Math.max(bin, low));
    return found;
  }

  show() {
    const { rows, caption } = this.table, { view, at, data: { ranks, arrays } } = this;
    if (view.whole) return this.section.showRows(rows, caption);
    const totals = new Map(ranks.map((rank, index) => [rank, this.sum(arrays.totals, index)]));
    const found = rows.map((row, index) => {
      const nanojoules = this.sum(arrays.nanojoules, index), made = row.slice();
      made[at.Energy] = nanojoules / 1000;
      made[at["Energy Percent"]] = (100 * nanojoules) / (totals.get(row[at.Rank]) || 1);
      made[at.Calls] = Math.round(this.sum(arrays.calls, index));
      made[at["Mean Energy"]] = made[at.Measured] = null; // calls that reach out of the time are there in part
      return made;
    });
    found.sort((one, other) => other[at.Energy] - one[at.Energy]);
    const time = `${inTime(view.begin, view.ns)} to ${inTime(view.end, view.ns)}`;
    return this.section.showRows(found.filter((row) => row[at.Energy] > 0), `Energy in uJ, from ${time}. Calls are those that begin in that time.`);
  }
}
