# Hashes, ciphers, keys and certificates.
set -u
export LC_ALL=C
rounds=${1:-4}
seq 200000 >data
for ((r = 1; r <= rounds; r++)); do
    for hash in md5 sha1 sha256 sha512 sha3-256 blake2b512; do openssl dgst -$hash data; done
    for cipher in aes-128-cbc aes-256-ctr chacha20 camellia-256-cbc; do
        openssl enc -$cipher -pbkdf2 -iter 20000 -S 0011223344556677 -pass pass:secret -in data -out "$cipher.enc" || exit
        openssl enc -d -$cipher -pbkdf2 -iter 20000 -S 0011223344556677 -pass pass:secret -in "$cipher.enc" | cmp - data && echo "$cipher: the same"
    done
    # Keys are random: only their use is compared, and then they are removed.
    openssl genrsa -out rsa.pem 2048 2>/dev/null; openssl ecparam -name prime256v1 -genkey -noout -out ec.pem; openssl genpkey -algorithm ed25519 -out ed.pem
    for key in rsa ec ed; do
        openssl req -x509 -new -key $key.pem -subj "/CN=$key" -days 30 -out $key.crt 2>&1; openssl x509 -in $key.crt -noout -subject; openssl verify -CAfile $key.crt $key.crt
        openssl pkey -in $key.pem -pubout -out $key.pub
    done
    openssl dgst -sha256 -sign rsa.pem -out sig data; openssl dgst -sha256 -verify rsa.pub -signature sig data
    openssl dgst -sha256 -sign ec.pem -out sig data; openssl dgst -sha256 -verify ec.pub -signature sig data
    openssl pkeyutl -sign -inkey rsa.pem -rawin -digest sha256 -in data -out sig; openssl pkeyutl -verify -pubin -inkey rsa.pub -rawin -digest sha256 -in data -sigfile sig
    openssl rand 1000 | wc -c; openssl prime 1000003; openssl prime -generate -bits 256 | wc -l; echo test | openssl base64; openssl passwd -6 -salt abcdefgh word
    rm -f ./*.pem ./*.crt ./*.pub sig
done
sha256sum ./*.enc
