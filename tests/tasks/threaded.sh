# Programs with threads, selected by name. The output is the same each time.
set -u
export LC_ALL=C HOME=$PWD
case $1 in
ffmpeg)
    ffmpeg -v error -threads 4 -f lavfi -i testsrc2=s=320x240:d=4 -f lavfi -i sine=d=4 -c:v mpeg4 -bitexact -c:a flac -shortest out.mkv
    ffmpeg -v error -threads 4 -i out.mkv -f framemd5 - | cksum
    ;;
redis)
    redis-server --port 0 --unixsocket "$PWD/socket" --save '' --appendonly no --daemonize no >/dev/null & server=$!
    until redis-cli -s socket ping >/dev/null 2>&1; do kill -0 $server || exit; done
    redis-benchmark -s socket -q -n 20000 -c 8 -t set,get,incr,lpush,lrange_100 >/dev/null || exit
    redis-cli -s socket get counter:__rand_int__; redis-cli -s socket llen mylist; redis-cli -s socket shutdown nosave; wait $server; echo "server $?"
    ;;
go)
    cat >main.go <<'END'
package main
import ("fmt"; "sync")
func main() {
	var wait sync.WaitGroup
	work, sums := make(chan int), make(chan int, 1000)
	for w := 0; w < 8; w++ { wait.Add(1); go func() { defer wait.Done(); for n := range work { s := 0; for i := 0; i < 200000; i++ { s = (s*31 + i*n) % 1000003 }; sums <- s } }() }
	for n := 0; n < 400; n++ { work <- n }
	close(work); wait.Wait(); close(sums)
	total := 0; for s := range sums { total += s }
	fmt.Println(total)
}
END
    # Its cache contains times.
    cache=$(mktemp -d); GOCACHE=$cache GOFLAGS=-mod=mod GO111MODULE=off go build -o main main.go && ./main; rm -rf "$cache"
    ;;
java)
    cat >Main.java <<'END'
import java.util.concurrent.*; import java.util.stream.*;
public class Main {
    public static void main(String[] a) throws Exception {
        System.out.println(LongStream.range(0, 20_000_000).parallel().map(n -> n * n % 1000003).sum());
        var pool = Executors.newFixedThreadPool(6);
        var all = IntStream.range(0, 60).mapToObj(n -> pool.submit(() -> { var s = new StringBuilder(); for (int i = 0; i < 20000; i++) s.append(i * n % 10); return s.toString().hashCode(); })).toList();
        long t = 0; for (var one : all) t += one.get(); System.out.println(t); pool.shutdown();
    }
}
END
    javac Main.java && java -XX:+UseSerialGC Main
    ;;
node)
    cat >main.js <<'END'
const { Worker, isMainThread, workerData, parentPort } = require('worker_threads');
if (isMainThread) {
    let left = 6, total = 0;
    for (let n = 0; n < 6; n++) new Worker(__filename, { workerData: n }).on('message', (s) => { total += s; if (!--left) console.log(total); });
} else {
    let s = workerData;
    for (let i = 0; i < 5e6; i++) s = (s * 31 + i) % 1000003;
    parentPort.postMessage(s);
}
END
    node main.js
    ;;
multiprocessing)
    cat >main.py <<'END'
import multiprocessing as mp, time
from multiprocessing import shared_memory
def work(i, q, lock, counter, arr):
    for n in range(60):
        with lock:
            counter.value += 1
            arr[i] += 1
        time.sleep(0.005)
    q.put((i, arr[i]))
def square(x):
    time.sleep(0.01)
    return x * x
q, lock, counter, arr = mp.Queue(), mp.Lock(), mp.Value('i', 0, lock=False), mp.Array('i', 4)
workers = [mp.Process(target=work, args=(i, q, lock, counter, arr)) for i in range(4)]
for one in workers: one.start()
print(sorted(q.get() for _ in workers))
for one in workers: one.join()
print(counter.value, arr[:])
with mp.Pool(3) as pool: print(sum(pool.map(square, range(100))))
shm = shared_memory.SharedMemory(create=True, size=100000)
shm.buf[:5] = b'hello'
print(bytes(shm.buf[:5])); shm.close(); shm.unlink()
END
    python3 main.py
    ;;
rayon) "$2" ;;
*) exit 2 ;;
esac
