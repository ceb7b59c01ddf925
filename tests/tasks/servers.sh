# A server with an event loop, selected by name, that answers each text in capitals; a client that checks each answer,
# and a program that computes meanwhile. The output is the same each time.
set -u
export LC_ALL=C HOME=$PWD
case $1 in
node)
    cat >server.js <<'END'
const server = require('net').createServer((socket) => {
    socket.on('error', () => {});
    socket.on('data', (data) => socket.write(data.toString('latin1').toUpperCase()));
});
server.listen(0, '127.0.0.1', () => require('fs').writeFileSync('port', server.address().port + '\n'));
END
    command="node server.js"
    ;;
java)
    cat >Server.java <<'END'
import java.net.InetSocketAddress; import java.nio.ByteBuffer; import java.nio.channels.*; import java.nio.file.*;
public class Server {
    public static void main(String[] a) throws Exception {
        var selector = Selector.open();
        var listener = ServerSocketChannel.open().bind(new InetSocketAddress("127.0.0.1", 0));
        listener.configureBlocking(false).register(selector, SelectionKey.OP_ACCEPT);
        Files.writeString(Path.of("port"), ((InetSocketAddress) listener.getLocalAddress()).getPort() + "\n");
        while (true) {
            selector.select();
            for (var key : selector.selectedKeys()) {
                if (key.isAcceptable()) listener.accept().configureBlocking(false).register(selector, SelectionKey.OP_READ);
                else answer((SocketChannel) key.channel());
            }
            selector.selectedKeys().clear();
        }
    }
    static void answer(SocketChannel channel) throws Exception {
        var buffer = ByteBuffer.allocate(8192);
        if (channel.read(buffer) < 0) { channel.close(); return; }
        for (int at = 0; at < buffer.position(); at++) buffer.put(at, (byte) Character.toUpperCase(buffer.get(at)));
        buffer.flip();
        while (buffer.hasRemaining()) channel.write(buffer);
    }
}
END
    javac Server.java || exit
    command="java Server"
    ;;
python)
    cat >server.py <<'END'
import asyncio
async def answer(reader, writer):
    while data := await reader.read(8192):
        writer.write(data.upper())
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(answer, '127.0.0.1', 0)
    with open('port', 'w') as file: print(server.sockets[0].getsockname()[1], file=file)
    await server.serve_forever()
asyncio.run(main())
END
    command="/usr/bin/python3 server.py"
    ;;
*) exit 2 ;;
esac
cat >client.py <<'END'
import random, socket, sys
port, rounds = int(sys.argv[1]), int(sys.argv[2])
connect = lambda: socket.create_connection(('127.0.0.1', port))
connections, right = [connect() for _ in range(4)], 0
for round in range(rounds):
    texts = [''.join(random.choices('abcdefgh', k=random.choice([1, 30, 3000]))) for _ in connections]
    for connection, text in zip(connections, texts): connection.sendall(text.encode())
    for connection, text in zip(connections, texts):
        answer = b''
        while len(answer) < len(text) and (more := connection.recv(65536)): answer += more
        if answer != text.upper().encode(): sys.exit(f'round {round}: {text!r} is answered {answer!r}')
        right += 1
    if round % 20 == 0:
        connections.pop(0).close()
        connections.append(connect())
print(right, 'answers are right')
END
# Programs are counted by their names, so the client has one of its own.
ln -s /usr/bin/python3 client
$command & server=$!
until [ -s port ]; do kill -0 $server || exit; sleep 0.05; done
awk 'BEGIN { while (1) i++ }' & computing=$!
./client client.py "$(cat port)" "$2"; echo "client $?"
for pid in $server $computing; do kill $pid; wait $pid 2>/dev/null; echo "end $?"; done
rm port client
