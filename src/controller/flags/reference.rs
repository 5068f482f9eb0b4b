//! The reference of all flags, for the manual. Generated from the same definitions that parse them.

use std::fmt::Write;

use clap::CommandFactory;

use crate::controller::flags::ControllerCommandLine;

/// One table a group of flags, in Markdown.
#[must_use]
pub fn reference() -> String {
    let command = ControllerCommandLine::command();
    let mut groups: Vec<&str> = Vec::new();
    for heading in command.get_arguments().filter_map(clap::Arg::get_help_heading) {
        if !groups.contains(&heading) {
            groups.push(heading);
        }
    }
    let mut page = String::new();
    for group in groups {
        let _ = write!(
            page,
            "### {group}\n\n| flag | also | variable | default | meaning |\n|---|---|---|---|---|\n"
        );
        for argument in command.get_arguments().filter(|argument| argument.get_help_heading() == Some(group))
        {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            let aliases: Vec<String> = aliases.iter().map(|alias| format!("`--{alias}`")).collect();
            let default: Vec<String> = argument
                .get_default_values()
                .iter()
                .map(|value| value.to_string_lossy().into_owned())
                .collect();
            let default = default.join(",");
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let words = argument.get_possible_values();
            let words: Vec<String> = words
                .iter()
                .filter(|_| !matches!(argument.get_value_names(), Some([name]) if name.as_str() == "BOOL"))
                .map(|word| match word.get_help() {
                    Some(help) => format!("`{}`: {}", word.get_name(), lower(&help.to_string())),
                    None => format!("`{}`", word.get_name()),
                })
                .collect();
            let words = if words.is_empty() { String::new() } else { format!(". {}", words.join("; ")) };
            let _ = writeln!(
                page,
                "| `--{}` | {} | `{}` | {} | {help}{words} |",
                argument.get_long().unwrap_or_default(),
                aliases.join(", "),
                argument.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
                if default.is_empty() { String::new() } else { format!("`{default}`") },
            );
        }
        page.push('\n');
    }
    page
}

fn lower(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_lowercase().chain(letters).collect()).unwrap_or_default()
}
