import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * A JVM whose threads write into memory while it leaps: into a region, and into memory that the JVM
 * itself has taken from malloc. The JVM uses SIGSEGV itself: for null checks of code that it has
 * compiled, to stop threads at safepoints, and for stacks that overflow. It collects garbage. All
 * of this must work before, during and after leaps, and no write may be lost.
 */
final class Host {
    private static final int BYTES = 16 << 20;
    private static final int WORDS = BYTES / 8;
    private static final int WRITERS = 2;
    /** pageleap_engine: auto, precopy-protect, mprotect. The last two need the library's own
     * SIGSEGV handler. */
    private static final int[] ENGINES = {0, 3, 4};
    private static final int LEAPS = 30;

    /** What a word holds before anybody writes it: a page of zeros would be noticed. */
    private static final long UNTOUCHED = 1L << 40;
    /** The exit code of a program that lacks something; its last line says what. */
    private static final int SKIPPED = 77;

    private static volatile boolean stop;
    private static volatile long collections;
    private static volatile Throwable failure;

    private static native ByteBuffer start(long bytes);

    private static native void leap(int engine);

    /** Leaps the memory of a direct buffer in place. Returns how many pages have moved. */
    private static native long leapMemory(ByteBuffer buffer);

    /** The pages that {@link #leapMemory} asks for. */
    private static native long pages(ByteBuffer buffer);

    /** Why memory that no pool owns stays where it is on this machine, or null. */
    private static native String whyNot();

    private static native long faults();

    private static native void end();

    /** May be null: compiled code reads its fields without asking first. */
    private static final class Link {
        Link next;
        long value;
    }

    private static long follow(Link link) {
        return link.next.value;
    }

    /** Reads through null references, and returns how often the JVM noticed. */
    private static long nullChecks(int times) {
        Link last = new Link();
        long noticed = 0;
        for (int i = 0; i < times; i++) {
            try {
                noticed += follow(last) == 0 ? 0 : 1;
            } catch (NullPointerException expected) {
                noticed++;
            }
        }
        return noticed;
    }

    private static int sink(int depth) {
        return depth < 0 ? 0 : 1 + sink(depth + 1);
    }

    private static void overflow() {
        try {
            sink(0);
            throw new AssertionError("a stack without end");
        } catch (StackOverflowError expected) {
            // What was asked for.
        }
    }

    /** Counts up words of its own, and expects to find in each what it wrote last. */
    private static void write(ByteBuffer buffer, int writer, long[] last) {
        for (long round = 1; !stop; round++) {
            for (int i = writer; i < WORDS; i += WRITERS * 61) {
                int word = (int) ((i + round * WRITERS) % WORDS);
                long found = buffer.getLong(word * 8);
                if (found != last[word]) {
                    throw new AssertionError(
                        "word " + word + ": found " + found + ", wrote " + last[word]);
                }
                buffer.putLong(word * 8, ++last[word]);
            }
        }
    }

    /** Fills a buffer, and returns what is in its words. */
    private static long[] fill(ByteBuffer buffer) {
        long[] last = new long[WORDS];
        for (int word = 0; word < WORDS; word++) {
            last[word] = UNTOUCHED + word;
            buffer.putLong(word * 8, last[word]);
        }
        return last;
    }

    /** Expects to find every write, and returns how many there were. */
    private static long writes(ByteBuffer buffer, long[] last) {
        long writes = 0;
        for (int word = 0; word < WORDS; word++) {
            check(buffer.getLong(word * 8) == last[word], "a write of word " + word + " is lost");
            writes += last[word] - UNTOUCHED - word;
        }
        check(writes > 0, "nobody has written");
        return writes;
    }

    private static Thread thread(Runnable body) {
        Thread thread = new Thread(() -> {
            try {
                body.run();
            } catch (Throwable thrown) {
                failure = thrown;
            }
        });
        thread.start();
        return thread;
    }

    private static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.loadLibrary("host_jvm");
        check(nullChecks(20_000) == 20_000, "null checks before the library");
        ByteBuffer buffer = start(BYTES).order(ByteOrder.nativeOrder());
        // Reachable until the last leap has ended: the collector frees the memory of other buffers.
        ByteBuffer memory = ByteBuffer.allocateDirect(BYTES).order(ByteOrder.nativeOrder());
        long[] last = fill(buffer);
        long[] lastInMemory = fill(memory);
        Thread[] threads = {
            thread(() -> write(buffer, 0, last)),
            thread(() -> write(buffer, 1, last)),
            thread(() -> write(memory, 0, lastInMemory)),
            thread(() -> write(memory, 1, lastInMemory)),
            thread(() -> {
                while (!stop) {
                    check(nullChecks(1_000) == 1_000, "a null check was not noticed");
                }
            }),
            thread(() -> {
                while (!stop) {
                    overflow();
                }
            }),
            thread(() -> {
                while (!stop) {
                    System.gc();
                    collections++;
                }
            }),
        };
        int leaps = 0;
        long moved = 0;
        while (leaps < LEAPS || collections == 0 && failure == null) {
            leap(ENGINES[leaps % ENGINES.length]);
            moved += leapMemory(memory);
            leaps++;
        }
        stop = true;
        for (Thread thread : threads) {
            thread.join();
        }
        if (failure != null) {
            throw new AssertionError(failure);
        }
        long writes = writes(buffer, last);
        long writesInMemory = writes(memory, lastInMemory);
        long during = faults();
        check(during > 0, "the JVM has had no fault");
        end();
        check(nullChecks(1_000) == 1_000, "null checks after the leaps");
        overflow();
        System.out.println(
            leaps + " leaps, " + writes + " writes, " + during + " faults of the JVM's own");
        long asked = leaps * pages(memory);
        System.out.println(
            "memory in place: " + moved + " of " + asked + " pages moved, " + writesInMemory
                + " writes, " + collections + " collections, 0 lost");
        if (whyNot() != null) {
            System.out.println("memory of the JVM stayed where it was: " + whyNot());
            System.exit(SKIPPED);
        }
        check(moved * 100 >= asked * 95, "too few pages have moved");
    }
}
