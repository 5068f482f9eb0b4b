# shellcheck shell=bash
# One authority and the certificates of the control plane, made for each lab.

API_ADDRESS=172.30.0.1
ADMIN_KUBECONFIG=$LAB_DIR/admin.kubeconfig

# certificate NAME SUBJECT [EXTENSION]: good for both ends of a connection.
certificate() {
    local at=$LAB_DIR/pki/$1
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$at.key" -subj "$2" -out "$at.csr" 2>/dev/null
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature,keyEncipherment"
        echo "extendedKeyUsage=serverAuth,clientAuth"
        [[ -z ${3-} ]] || echo "$3"
    } >"$at.extensions"
    openssl x509 -req -in "$at.csr" -CA "$LAB_DIR/pki/ca.crt" -CAkey "$LAB_DIR/pki/ca.key" -CAcreateserial -days 30 \
        -extfile "$at.extensions" -out "$at.crt" 2>/dev/null
}

pki_make() {
    local pki=$LAB_DIR/pki
    mkdir -m 700 "$pki"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$pki/ca.key" -days 30 -subj /CN=sticky-ipam-lab \
        -out "$pki/ca.crt" -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign 2>/dev/null
    openssl genrsa -out "$pki/sa.key" 2048 2>/dev/null
    openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub" 2>/dev/null
    certificate apiserver /CN=kube-apiserver \
        "subjectAltName=IP:$API_ADDRESS,IP:127.0.0.1,IP:10.96.0.1,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost"
    certificate admin /O=system:masters/CN=admin
    cat >"$ADMIN_KUBECONFIG" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "https://$API_ADDRESS:6443", certificate-authority-data: $(base64 -w0 "$pki/ca.crt")}}]
users: [{name: admin, user: {client-certificate-data: $(base64 -w0 "$pki/admin.crt"), client-key-data: $(base64 -w0 "$pki/admin.key")}}]
contexts: [{name: lab, context: {cluster: lab, user: admin}}]
current-context: lab
YAML
}
