//! Tokens of another time: what a service account's token would be, had it been given out earlier. Signed by
//! the server's own key, so that nothing but its times is wrong with it.

use k8s_openapi::ByteString;
use rcgen::{KeyPair, SigningKey};
use serde_json::Value;

/// The times of a token, by their names in it.
const TIMES: [&str; 3] = ["iat", "nbf", "exp"];

/// The same token as of so many seconds before. `key` is the one that signs the server's tokens, as PEM.
pub fn given_out_earlier(token: &str, seconds: i64, key: &str) -> String {
    let (head, rest) = token.split_once('.').expect("a token has three parts");
    let (claims, _) = rest.split_once('.').expect("a token has three parts");
    let mut claims: Value = serde_json::from_slice(&decoded(claims)).expect("claims are JSON");
    for time in TIMES {
        claims[time] = (claims[time].as_i64().expect("every token has it") - seconds).into();
    }
    let signed = format!("{head}.{}", encoded(claims.to_string().into_bytes()));
    let key = KeyPair::from_pem(key).expect("the bench wrote it");
    let signature = key.sign(signed.as_bytes()).expect("the key signs");
    format!("{signed}.{}", encoded(plain(&signature)))
}

/// Base64 as tokens have it.
fn encoded(bytes: Vec<u8>) -> String {
    let text = serde_json::to_value(ByteString(bytes)).expect("bytes");
    text.as_str().expect("a text").trim_end_matches('=').replace('+', "-").replace('/', "_")
}

fn decoded(text: &str) -> Vec<u8> {
    let padding = "=".repeat((4 - text.len() % 4) % 4);
    let text = format!("{}{padding}", text.replace('-', "+").replace('_', "/"));
    let ByteString(bytes) = serde_json::from_value(text.into()).expect("base64");
    bytes
}

/// The two numbers of a signature by their 32 bytes, as tokens have them, from their ASN.1.
fn plain(signature: &[u8]) -> Vec<u8> {
    let mut numbers = Vec::new();
    // A sequence of two integers, each with its tag and its length. A leading zero keeps one positive.
    let mut rest = &signature[2..];
    while let [2, length, more @ ..] = rest {
        let (number, after) = more.split_at(usize::from(*length));
        let digits = &number[number.len().saturating_sub(32)..];
        numbers.extend(std::iter::repeat_n(0, 32 - digits.len()));
        numbers.extend_from_slice(digits);
        rest = after;
    }
    numbers
}
