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

pub fn print_and_write(rows: &[Row]) {
    let mut text = String::new();
    writeln!(text, "| work | host-local v1.9.1 | sticky-ipam | ratio | bar | met |").unwrap();
    writeln!(text, "|---|---|---|---|---|---|").unwrap();
    for row in rows {
        let ratio = row.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.3}"));
        let met = row.met.map_or("–", |met| if met { "yes" } else { "**no**" });
        writeln!(text, "| {} | {} | {} | {ratio} | {} | {met} |", row.work, row.peer, row.ours, row.bar)
            .unwrap();
    }
    println!("\n{text}");
    let page = format!(
        "# Benchmarks\n\nWritten by `make bench`; the table is of the last run that was committed. Times are wall-clock of a whole\n\
         run of the plugin, median (99th percentile) in milliseconds; both plugins take turns in the same run. Ours has\n\
         every change on stable storage before it answers, host-local does not.\n\nMachine: {}. Date: {}.\n\n{text}",
        machine(),
        output_of("date", &["-u", "+%Y-%m-%d"]),
    );
    fs::write("docs/benchmarks.md", page).expect("docs/benchmarks.md can be written");
    println!("written to docs/benchmarks.md");
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
