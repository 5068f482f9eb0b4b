//! The text of a resolv.conf as name service settings. Reading the file is the caller's work.

use crate::cni::result::Dns;

/// Reads nameserver, domain, search and options lines; everything else, and words that stand alone, is
/// skipped.
pub(crate) fn parse_resolv_conf(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines().map(str::trim) {
        if line.starts_with(['#', ';']) {
            continue;
        }
        let mut words = line.split_whitespace();
        let (Some(keyword), Some(value)) = (words.next(), words.next()) else { continue };
        let list = || std::iter::once(value).chain(words).map(str::to_owned);
        match keyword {
            "nameserver" => dns.nameservers.push(value.to_owned()),
            "domain" => dns.domain = Some(value.to_owned()),
            "search" => dns.search.extend(list()),
            "options" => dns.options.extend(list()),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_lone_words_and_unknown_lines_are_skipped_and_lists_add_up() {
        let text = "# c\n; c\nnameserver 192.0.2.3\nnameserver fd00::53 x\ndomain a.b\nsearch c d\n\
                    \tsearch e\noptions ndots:5 edns0\nbogus\nsortlist 1 2\n";
        let dns = parse_resolv_conf(text);
        assert_eq!(dns.nameservers, ["192.0.2.3", "fd00::53"]);
        assert_eq!(dns.domain.as_deref(), Some("a.b"));
        assert_eq!(dns.search, ["c", "d", "e"]);
        assert_eq!(dns.options, ["ndots:5", "edns0"]);
    }
}
