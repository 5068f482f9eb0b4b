//! The table, for the terminal and for docs/benchmarks.md.

use std::fmt::Write;
use std::fs;
use std::process::Command;

/// One line of the table.
pub struct Row {
    pub work: String,
    pub peer: String,
    pub ours: String,
    pub ratio: Option<f64>,
    pub bar: String,
    pub met: Option<bool>,
}

/// A table of the page: its heading, and the name of the peer if there is one.
pub struct Heading {
    pub title: &'static str,
    pub peer: Option<&'static str>,
}

pub const LOCAL: Heading = Heading { title: "One node, against host-local", peer: Some("host-local v1.9.1") };
pub const CLUSTER: Heading =
    Heading { title: "By an API server, against whereabouts", peer: Some("whereabouts v0.8.0") };
pub const CONTROLLER: Heading = Heading { title: "The controller, with 12,000 bindings", peer: None };
pub const LAB: Heading =
    Heading { title: "On the lab, against stock Cilium", peer: Some("Cilium v1.19.5 alone") };
pub const BURST: Heading =
    Heading { title: "Many pods at once, against stock Cilium", peer: Some("Cilium v1.19.5 alone") };

const PAGE: &str = "docs/benchmarks.md";
const INTRODUCTION: &str = "\
    # How fast is it?\n\n\
    Words are explained in the [glossary](glossary.md).\n\n\
    `make bench`, `make bench-lab` and `make bench-burst` write this page; each table is from the last run that\n\
    was committed. A row shows its limit (bar). Both sides alternate on the same machine in the same run.\n";

/// Prints a table, and puts it in place of the one with this heading.
pub fn print_and_write(heading: &Heading, about: &str, rows: &[Row]) {
    let mut text = String::new();
    match heading.peer {
        Some(peer) => {
            writeln!(text, "| work | {peer} | sticky-ipam | ratio | bar | met |\n|---|---|---|---|---|---|")
        }
        None => writeln!(text, "| work | sticky-ipam | bar | met |\n|---|---|---|---|"),
    }
    .unwrap();
    for Row { work, peer, ours, ratio, bar, met } in rows {
        let ratio = ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.3}"));
        let met = met.map_or("–", |met| if met { "yes" } else { "**no**" });
        match heading.peer {
            Some(_) => writeln!(text, "| {work} | {peer} | {ours} | {ratio} | {bar} | {met} |"),
            None => writeln!(text, "| {work} | {ours} | {bar} | {met} |"),
        }
        .unwrap();
    }
    println!("\n## {}\n\n{text}", heading.title);
    let section = format!(
        "\n## {}\n\n{about}\n\nMachine: {}. Date: {}.\n\n{text}",
        heading.title,
        machine(),
        output_of("date", &["-u", "+%Y-%m-%d"]),
    );
    let before = fs::read_to_string(PAGE).unwrap_or_default();
    fs::write(PAGE, with_section(&before, heading, &section)).expect("the page can be written");
    println!("written to {PAGE}");
}

/// The page with one section replaced, the others as they were.
fn with_section(page: &str, heading: &Heading, section: &str) -> String {
    let old = |title: &str| {
        let start = page.find(&format!("\n## {title}\n"))?;
        let length = page[start + 1..].find("\n## ").map_or(page.len() - start, |next| next + 1);
        Some(&page[start..start + length])
    };
    let sections = [&LOCAL, &CLUSTER, &CONTROLLER, &LAB, &BURST].map(|one| {
        if one.title == heading.title { Some(section) } else { old(one.title) }.unwrap_or_default()
    });
    format!("{INTRODUCTION}{}", sections.concat())
}

fn machine() -> String {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown");
    let kernel = output_of("uname", &["-sr"]);
    let system = output_of("stat", &["-f", "-c", "%T", "."]);
    format!(
        "{} × {}, {kernel}, {system}",
        output_of("nproc", &[]),
        model.trim_start_matches([':', '\t', ' '])
    )
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect(program);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
