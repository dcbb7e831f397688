// SPDX-License-Identifier: Apache-2.0
// What stacks.go calls.
void probe_me(long);
void goBack(long);

void call_probe_me(long number)
{
    probe_me(number);
    __asm__ volatile("" ::: "memory");
}

void call_back(long times, long left)
{
    while (times--)
        goBack(left);
}
