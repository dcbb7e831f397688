// SPDX-License-Identifier: Apache-2.0
// A library for Python: call_probe_me(n), and one that calls back.
void probe_me(long);

long call_probe_me(long number)
{
    probe_me(number);
    __asm__ volatile("" ::: "memory");
    return number;
}

long call_back(long (*function)(long), long number)
{
    long result = function(number);
    __asm__ volatile("" ::: "memory");
    return result;
}
