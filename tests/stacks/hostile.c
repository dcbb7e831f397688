// SPDX-License-Identifier: Apache-2.0
// Calls each function of hostile.S: hostile ROUNDS. After the first round it waits for a byte of input; it ends when its input does.
#include <stdlib.h>
#include <unistd.h>

void loops(void), wild(void), down(void), here(void), again(void), rows(void), pops(void), far(void), bare(void);

int main(int count, char **words)
{
    char byte, *volatile pointer = (char *)words; // another one each time, where a walk may look for return addresses
    for (int round = 0; round < atoi(words[count - 1]); round++) {
        pointer += 4096;
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
        if (!round && read(0, &byte, 1) < 0)
            return 1;
    }
    return read(0, &byte, 1) != 0;
}
