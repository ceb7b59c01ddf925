# One short-lived thread after the other.
exec /usr/bin/python3 -S - <<'END'
import threading
born = 0
def work():
    global born
    born += 1
for _ in range(300):
    for i in range(80000): pass
    one = threading.Thread(target=work)
    one.start(); one.join()
print(born, "threads ran")
END
