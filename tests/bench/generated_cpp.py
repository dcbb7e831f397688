"""A large C++ program with full debug information, made of generated source: templates, inlining, lambdas, namespaces.

Each unit has types of its own, with which it instantiates the standard library's containers and algorithms and a few
templates of the program itself, as large programs do; so the units share nearly nothing. `build` makes it once and
keeps it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

UNITS, TYPES = 27, 10  # make a binary of 190 MB with g++ 12
FLAGS = ("-std=c++17", "-O2", "-g", "-fno-omit-frame-pointer")

HEADER = r"""
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

namespace shapes {
template <typename T, int N> struct Row {
    T cells[N];
    T dot(const Row &other) const {
        T sum = 0;
        for (int i = 0; i < N; i++)
            sum += cells[i] * other.cells[i];
        return sum;
    }
    template <typename F> Row mapped(F &&change) const {
        Row out;
        for (int i = 0; i < N; i++)
            out.cells[i] = change(cells[i], i);
        return out;
    }
};
namespace detail {
template <typename T> inline T clamp(T value, T low, T high) { return value < low ? low : value > high ? high : value; }
template <typename T> inline T mix(T value) {
    auto turned = static_cast<std::uint64_t>(value) * 0x9E3779B97F4A7C15ull;
    return static_cast<T>(clamp<std::uint64_t>(turned ^ (turned >> 29), 3, ~0ull >> 1));
}
} // namespace detail
template <typename T> class Grid {
  public:
    explicit Grid(std::size_t width) : width_(width), cells_(width * width) {}
    T &at(std::size_t x, std::size_t y) {
        if (x >= width_ || y >= width_)
            throw std::out_of_range("outside the grid");
        return cells_[y * width_ + x];
    }
    template <typename F> void each(F &&visit) {
        for (std::size_t y = 0; y < width_; y++)
            for (std::size_t x = 0; x < width_; x++)
                visit(at(x, y), x, y);
    }

  private:
    std::size_t width_;
    std::vector<T> cells_;
};
} // namespace shapes
"""

TYPE = r"""
namespace unit@U@ {
namespace {
struct Hidden@K@ {
    int weight;
    int heavier(int by) const { return shapes::detail::mix(weight + by) & 0xffff; }
};
} // namespace

struct Item@K@ {
    std::uint64_t key = @K@;
    std::string label;
    std::vector<double> values;
    bool operator<(const Item@K@ &other) const {
        return std::tie(key, label) < std::tie(other.key, other.label);
    }
    bool operator==(const Item@K@ &other) const { return key == other.key && label == other.label; }
};
struct Hash@K@ {
    std::size_t operator()(const Item@K@ &item) const {
        return shapes::detail::mix(item.key) ^ std::hash<std::string>{}(item.label);
    }
};
struct Base@K@ {
    virtual ~Base@K@() = default;
    virtual int step(int n) const = 0;
};
template <int S> struct Derived@K@ final : Base@K@ {
    shapes::Row<int, S + 2> row;
    int step(int n) const override {
        auto changed = row.mapped([n](int cell, int i) { return shapes::detail::mix(cell + i * n); });
        return changed.dot(row);
    }
};
static int local@K@(const std::vector<Item@K@> &items, int n) {
    Hidden@K@ hidden{n};
    int sum = 0;
    for (const auto &item : items)
        sum += hidden.heavier(static_cast<int>(item.key)) + static_cast<int>(item.label.size());
    return sum;
}
__attribute__((noinline)) int run@K@(int n) {
    std::vector<Item@K@> items;
    for (int i = 0; i < n; i++)
        items.push_back({shapes::detail::mix<std::uint64_t>(i), std::to_string(i), {1.0 * i, 2.0}});
    std::sort(items.begin(), items.end(), [](const auto &a, const auto &b) { return b < a; });
    std::stable_sort(items.begin(), items.end());
    std::map<Item@K@, std::vector<Item@K@>> tree;
    std::unordered_map<Item@K@, std::unique_ptr<Base@K@>, Hash@K@> table;
    for (const auto &item : items) {
        tree[item].push_back(item);
        if (item.key % 2)
            table.emplace(item, std::make_unique<Derived@K@<1>>());
        else
            table.emplace(item, std::make_unique<Derived@K@<4>>());
    }
    std::variant<int, Item@K@, std::vector<Item@K@>> choice = n;
    if (n % 3 == 1)
        choice = items.empty() ? Item@K@{} : items.front();
    else if (n % 3 == 2)
        choice = items;
    int sum = std::visit(
        [&](const auto &chosen) -> int {
            using Chosen = std::decay_t<decltype(chosen)>;
            if constexpr (std::is_same_v<Chosen, int>)
                return chosen;
            else if constexpr (std::is_same_v<Chosen, Item@K@>)
                return static_cast<int>(chosen.label.size());
            else
                return local@K@(chosen, n);
        },
        choice);
    shapes::Grid<Item@K@> grid(4);
    std::function<void(Item@K@ &, std::size_t, std::size_t)> visit = [&](Item@K@ &item, std::size_t x, std::size_t y) {
        item.key += x * y + n;
        sum += static_cast<int>(item.key);
    };
    grid.each(visit);
    for (const auto &[item, each] : table)
        sum += each->step(n) + static_cast<int>(tree.count(item));
    items.erase(std::remove_if(items.begin(), items.end(), [n](const Item@K@ &item) { return item.key % 5 == 0u + n; }),
                items.end());
    return std::accumulate(items.begin(), items.end(), sum + local@K@(items, n),
                           [](int so_far, const Item@K@ &item) { return so_far + static_cast<int>(item.values.size()); });
}
} // namespace unit@U@
"""  # noqa: E501


def sources(units: int, types: int) -> dict[str, str]:
    """The files of a program with that many units, each with that many types."""
    made = {"shapes.h": HEADER}
    for unit in range(units):
        body = "".join(TYPE.replace("@U@", str(unit)).replace("@K@", str(kind)) for kind in range(types))
        calls = " + ".join(f"unit{unit}::run{kind}(n)" for kind in range(types))
        made[f"unit{unit}.cpp"] = f'#include "shapes.h"\n{body}\nint enter{unit}(int n) {{ return {calls}; }}\n'
    declared = "".join(f"int enter{unit}(int);\n" for unit in range(units))
    calls = " + ".join(f"enter{unit}(argc)" for unit in range(units))
    made["main.cpp"] = f"{declared}int main(int argc, char **) {{ return ({calls}) == 42; }}\n"
    return made


def build(folder: Path, units: int = UNITS, types: int = TYPES, flags: tuple[str, ...] = FLAGS) -> Path:
    """The program, built into a folder of its own inside `folder`; one that is there already is taken.

    Takes some ten minutes of CPU for the large one.
    """
    made = sources(units, types)
    key = hashlib.sha256(repr((sorted(made.items()), flags)).encode()).hexdigest()[:16]
    here = folder / f"generated-{key}"
    program = here / "program"
    if program.exists():
        return program
    here.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (here / name).write_text(text)
    names = [name for name in made if name.endswith(".cpp")]

    def compiled(name: str) -> Path:
        out = here / name.replace(".cpp", ".o")
        subprocess.run(["g++", *flags, "-c", name, "-o", out.name], cwd=here, check=True)
        return out

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, names))
    linked = here / "program.new"
    subprocess.run(["g++", *flags, *(each.name for each in objects), "-o", linked.name], cwd=here, check=True)
    for each in objects:
        each.unlink()
    linked.rename(program)
    return program
