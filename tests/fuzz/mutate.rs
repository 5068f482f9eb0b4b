//! Mutants of a corpus, the same ones for the same seed.

/// A small generator (xorshift): good enough to choose bytes.
pub struct Mutator(u64);

/// Pieces that parsers care about.
const PIECES: &[&[u8]] = &[
    b"\0",
    b"=",
    b";",
    b"\n",
    b"\r\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b",",
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"../",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\\u0000",
    b"\\ud800",
    b"10.1.0.2",
    b"::",
    b"/0",
    b"/129",
    b"ADD",
    b"DEL",
    b"GC",
    b"CHECK",
    b"STATUS",
    b"1.1.0",
    b"0.2.0",
];

impl Mutator {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit.max(1) as u64).unwrap()
    }

    /// One of the corpus, changed in one to four places.
    pub fn mutant(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            let to = (at + self.below(16)).min(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..to)),
                2 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                3 => {
                    let copy = bytes[at..to].to_vec();
                    bytes.splice(at..at, copy);
                }
                4 => {
                    let other = &corpus[self.below(corpus.len())];
                    let from = self.below(other.len());
                    bytes.truncate(at);
                    bytes.extend_from_slice(&other[from..]);
                }
                _ => {
                    let piece = PIECES[self.below(PIECES.len())];
                    bytes.splice(at..to, piece.iter().copied());
                }
            }
        }
        bytes
    }
}
