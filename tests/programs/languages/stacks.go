// SPDX-License-Identifier: Apache-2.0

// Stacks of goroutines: stacks TOLD. Go calls C, which calls probe_me, and a function of its own, main.probeMe, each time with a
// number of its own. A line of TOLD has the number and the program counters that runtime.Callers gives, in hexadecimal.
// It does everything twice, and each time writes how many calls there were, and waits until a line comes.
package main

// void call_probe_me(long);
// void call_back(long, long);
import "C"

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"sync"
)

const goroutines = 6

var (
	told *os.File
	lock sync.Mutex
	last int
)

//go:noinline
func tell() int {
	var pcs [300]uintptr
	count := runtime.Callers(2, pcs[:])
	lock.Lock()
	defer lock.Unlock()
	last++
	fmt.Fprintf(told, "%d", last)
	for _, pc := range pcs[:count] {
		fmt.Fprintf(told, " %x", pc)
	}
	fmt.Fprintln(told)
	return last
}

//go:noinline
func inC() {
	number := tell()
	C.call_probe_me(C.long(number))
}

//go:noinline
func leaf(number int) int {
	return number & 7
}

// It calls something, so that it keeps a frame pointer.
//
//go:noinline
func probeMe(number int) int {
	return leaf(number) + 1
}

//go:noinline
func inGo() {
	number := tell()
	probeMe(number)
}

//go:noinline
func deep(left int) int {
	var room [10]int
	room[left%10] = left
	if left > 0 {
		return deep(left-1) + room[left%10]
	}
	inGo()
	inC()
	return 1
}

//export goBack
//go:noinline
func goBack(left C.long) {
	deep(int(left))
}

//go:noinline
func all(depth int) {
	deep(depth)
	C.call_back(1, C.long(depth))
}

//go:noinline
func round() {
	all(20)
	var group sync.WaitGroup
	for i := 0; i < goroutines; i++ {
		group.Add(1)
		i := i
		go func() {
			defer group.Done()
			all(i)
		}()
	}
	group.Wait()
}

func main() {
	told, _ = os.Create(os.Args[1])
	words := bufio.NewReader(os.Stdin)
	for i := 0; i < 2; i++ {
		round()
		fmt.Println(last)
		words.ReadString('\n')
	}
}
