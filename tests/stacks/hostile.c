// SPDX-License-Identifier: Apache-2.0
// Calls each function of hostile.S: hostile ROUNDS. It ends when its input does.
#include <stdlib.h>
#include <unistd.h>

void loops(void), wild(void), down(void), here(void), again(void), rows(void), pops(void), far(void), bare(void);

int main(int count, char **words)
{
    for (int round = 0; round < atoi(words[count - 1]); round++) {
        loops();
        wild();
        down();
        here();
        again();
        rows();
        pops();
        far();
        bare();
        usleep(1000);
    }
    char byte;
    return read(0, &byte, 1) != 0;
}
