// SPDX-License-Identifier: Apache-2.0

import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/**
 * Stacks of Java's threads: Stacks LIBRARY ROUNDS. Each calls the native function look with a number of its own, and with how many
 * methods the thread is in, as StackWalker says. After each round it writes how many calls there were, and waits until a line comes.
 */
public final class Stacks {
    private static final int THREADS = 2;

    private static long number;

    interface Work {
        long go(int left);
    }

    static native void look(long number, long methods);

    static synchronized long next() {
        return ++number;
    }

    static long stop() {
        long methods = StackWalker.getInstance(StackWalker.Option.SHOW_HIDDEN_FRAMES).walk(all -> all.count());
        look(next(), methods + 1);
        return 1;
    }

    static long deep(int left) {
        return left == 0 ? stop() : deep(left - 1) + 1;
    }

    static final class Other implements Work {
        @Override
        public long go(int left) {
            return left == 0 ? deep(3) : new Other().go(left - 1) + 1;
        }
    }

    static void throughLibrary() {
        Integer[] numbers = {3, 1, 2};
        Work work = left -> deep(left);
        Arrays.sort(numbers, (one, other) -> {
            work.go(2);
            return one - other;
        });
    }

    static void thrown() {
        try {
            throw new IllegalStateException();
        } catch (IllegalStateException caught) {
            deep(1);
        }
    }

    static void all() {
        deep(20);
        new Other().go(4);
        throughLibrary();
        thrown();
    }

    public static void main(String[] words) throws IOException, InterruptedException {
        System.load(words[0]);
        for (int round = 0; round < Integer.parseInt(words[1]); round++) {
            all();
            List<Thread> threads = new ArrayList<>();
            for (int i = 0; i < THREADS; i++) {
                Thread thread = new Thread(Stacks::all);
                thread.start();
                threads.add(thread);
            }
            for (Thread thread : threads) {
                thread.join();
            }
            System.out.println(number);
            System.in.read();
        }
    }
}
