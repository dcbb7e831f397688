// Groups of frames that readers may want to leave out: they are known by their modules, kinds and names.

const INTERPRETERS = /^((lib)?python[\d.]+[a-z]*|libpython|node|libnode|libjvm|java|libruby|ruby|libperl|perl|libjulia)([-.\d]|$)/;
const RUNTIMES =
  /^lib(ze_|zet_|OpenCL|igdrcl|igdfcl|igdgmm|intelocl|igc|iga|opencl-clang|sycl|ur_|pi_|level_zero|hsa|amdhip|cuda|tbb|gomp|iomp)/;
const C_LIBRARIES = /^(ld-(linux|musl)[-\w]*|lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|c\+\+|c\+\+abi|gcc_s|unwind)(-[\w.]+)?)\.so|^\[vdso\]$/;
const STARTS = /^(_start|__libc_start\w*(@.*)?|start_thread|_*clone3?|_dl_\w+)$/;

/** Name, and what is in it. Group 0 is everything else, which is always shown. */
const FRAME_GROUPS = [
  null,
  { key: "interpreter", name: "interpreter", title: "C functions of an interpreter such as CPython; your Python functions stay" },
  { key: "runtime", name: "GPU runtime", title: "Level Zero, OpenCL, SYCL and Intel's driver, as well as OpenMP and TBB" },
  { key: "libc", name: "C library", title: "The C and C++ libraries, the loader, and the first functions of threads" },
  { key: "kernel", name: "OS kernel", title: "The operating system's kernel" },
];

class FrameGroups {
  constructor(model) {
    this.model = model;
    this.known = new Map(); // texts of a tree -> Uint8Array
    this.made = new Map(); // tree -> Map: groups that are left out -> tree
  }

  /** The group of each frame of a tree. */
  of(tree) {
    if (!this.known.has(tree.texts))
      this.known.set(tree.texts, Uint8Array.from(tree.texts, (text, frame) => this.group(tree, text, frame)));
    return this.known.get(tree.texts);
  }

  group(tree, text, frame) {
    const kind = this.model.kinds[tree.kinds[frame]];
    if (kind === "OS kernel") return 4;
    if (kind !== "C" && kind !== "C++" && kind !== "unknown") return 0;
    const module = this.model.modules[tree.modules[frame]];
    if (INTERPRETERS.test(module)) return 1;
    if (RUNTIMES.test(module)) return 2;
    return C_LIBRARIES.test(module) || STARTS.test(unmarked(text)) ? 3 : 0;
  }

  /** The keys of the groups of which a tree has frames. */
  present(tree) {
    const found = new Set(this.of(tree));
    return FRAME_GROUPS.filter((group, number) => group && found.has(number)).map((group) => group.key);
  }

  /** Which frames of a tree are in some groups: Uint8Array. */
  among(tree, keys) {
    const hidden = FRAME_GROUPS.map((group) => group !== null && keys.has(group.key));
    return this.of(tree).map((group) => hidden[group]);
  }

  /** A tree without the frames of some groups. */
  without(tree, keys) {
    const left = this.present(tree).filter((key) => keys.has(key)).join();
    if (!left) return tree;
    if (!this.made.has(tree)) this.made.set(tree, new Map());
    const made = this.made.get(tree);
    if (!made.has(left)) made.set(left, tree.without(this.among(tree, keys)));
    return made.get(left);
  }
}
