// SPDX-License-Identifier: Apache-2.0
// A library whose function has PAD bytes in its frame: the same code otherwise, at the same place.
__attribute__((noinline)) void work(void (*function)(void), int left)
{
    volatile char pad[PAD];
    pad[0] = left;
    if (left)
        work(function, left - 1);
    else
        function();
    pad[1] = left;
}
