"use strict";
// Operators of a framework in the time line: a lane for each depth, the outermost on top.

const OPERATOR_COLOURS = 4;

/** Draws a thread's operators into a drawing that is `width` by `height`; `at` gives the place of a time. */
function drawOperators(svg, thread, at, height) {
  const lanes = Math.max(...thread.depths) + 1;
  const lane = height / lanes;
  const paths = Array.from({ length: OPERATOR_COLOURS }, () => "");
  thread.begins.forEach((begin, index) => {
    const left = at(begin), right = Math.max(at(begin + thread.lengths[index]), Number(left) + 0.3);
    const top = (thread.depths[index] * lane).toFixed(2), bottom = ((thread.depths[index] + 0.9) * lane).toFixed(2);
    paths[thread.names[index] % OPERATOR_COLOURS] += `M${left},${top}H${right}V${bottom}H${left}Z`;
  });
  paths.forEach((path, number) => {
    if (path) svg.append(drawn("path", { d: path, class: `time-operator time-operator-${number}` }));
  });
  svg.parentElement.style.height = `${Math.max(lanes * 10, 22)}px`;
}

/** The operators that run at a moment, the outermost first. */
function operatorsAt(thread, names, moment) {
  const found = [];
  thread.begins.forEach((begin, index) => {
    if (begin <= moment && moment < begin + thread.lengths[index]) found[thread.depths[index]] = names[thread.names[index]];
  });
  return found.filter((name) => name !== undefined).join(" › ");
}
