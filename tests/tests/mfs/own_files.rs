//! A node's own files below /mfs are its files under their native names: programs that compare
//! device and inode number find that two names mean one file, and do not destroy it.

use anyhow::{Result, ensure};
use tern_tests::cluster::Cluster;
use tern_tests::drivers::line_client::LineClient;

/// Runs commands in the directory `$1`, which contains the file `x` at the beginning of each
/// command. `$other` is another name of the directory. Prints the statuses of the commands, and the
/// files afterwards.
const SCRIPT: &str = r#"
cd "$1" && other=$2 && shift 2 || exit
# A command that appends a file to itself would not end.
ulimit -f 2048
for command; do
    rm -f * && printf 'b\na\n' > x && touch -d '1 hour ago' x
    eval "$command" > /dev/null 2>&1 < /dev/null
    echo "$command: $?" && head -c 99 *
done
"#;

/// Commands that compare files by device and inode number, and some that do not. To execute one
/// away takes half a second, so only the first [`AWAY`] are.
const COMMANDS: [&str; 20] = [
    "[ x -ef $other/x ]",
    "cp x $other/x",
    "mv x $other/x",
    "cat x >> $other/x",
    "cp $other/x x",
    "cp -f x $other/x",
    "cp --remove-destination x $other/x",
    "cp -a . $other/",
    "mv $other/x x",
    "mv -f x $other/",
    "install -m 600 x $other/x",
    "ln x $other/x",
    "ln -f x $other/x",
    "ln x $other/y && cp x $other/y",
    "ln -sf x $other/x",
    "sort -o $other/x x",
    "dd if=x of=$other/x conv=notrunc",
    "tar -cf $other/a.tar . && tar -tf a.tar > list && rm a.tar",
    "rsync -a x $other/x",
    "sed -i s/b/c/ $other/x && cat x",
];
const AWAY: usize = 4;

/// Two nodes that have mounted /mfs; node 1 has an empty directory /tmp/own.
fn mounted(prefix: &str) -> Result<Cluster> {
    let cluster = Cluster::without_quotas(prefix, 2)?;
    cluster.mount(1, "timeout=10")?;
    cluster.mount(2, "timeout=10")?;
    cluster.run(1, &["mkdir", "-m", "777", "/tmp/own"])?;
    Ok(cluster)
}

/// The output of the script, which runs on the node `away` if that is not 0.
fn outcomes(cluster: &Cluster, node: u16, away: u16, dirs: [&str; 2]) -> Result<String> {
    let away_node = away.to_string();
    let (run, commands) =
        if away == 0 { (&[][..], &COMMANDS[..]) } else { (&["runon", &away_node][..], &COMMANDS[..AWAY]) };
    let words = [&["timeout", "60"], run, &["sh", "-c", SCRIPT, "sh"], &dirs, commands].concat();
    Ok(String::from_utf8_lossy(&cluster.run(node, &words)?).into_owned())
}

/// A shell command's output with its errors.
fn said(cluster: &Cluster, node: u16, line: &str) -> Result<String> {
    let end = cluster.command(node, "timeout").args(["60", "sh", "-c", line]).output()?;
    Ok([end.stdout, end.stderr].iter().map(|text| String::from_utf8_lossy(text)).collect())
}

#[test]
fn both_names_of_a_file_are_known_to_be_one_file() -> Result<()> {
    let cluster = mounted("mfsown")?;
    let own = "/tmp/own";
    let native = outcomes(&cluster, 1, 0, [own, own])?;
    for command in &COMMANDS[1..9] {
        ensure!(native.contains(&format!("{command}: 1\nb\na\n")), "natively {command}: {native}");
    }
    for (node, away, dirs) in [
        (1, 0, [own, "/mfs/1/tmp/own"]),
        (1, 0, ["/mfs/home/tmp/own", "/mfs/1/mfs/0/tmp/own"]),
        // Away, node 1's files are those of home.
        (1, 2, [own, "/mfs/1/tmp/own"]),
        // For a program of node 2, they are those of another node.
        (2, 0, ["/mfs/1/tmp/own", "/mfs/2/mfs/1/tmp/own"]),
        (2, 1, ["/mfs/1/tmp/own", "/mfs/2/mfs/1/tmp/own"]),
    ] {
        let found = outcomes(&cluster, node, away, dirs)?;
        let is_native = if away == 0 { found == native } else { native.starts_with(&found) };
        ensure!(is_native && found.contains("mv x"), "{node}, {away}, {dirs:?}: {found}\nnatively: {native}");
    }
    Ok(())
}

/// The file is opened before the process is moved, and its other name is used afterwards.
#[test]
fn moved_program_compares_an_open_file_with_its_other_name() -> Result<()> {
    let cluster = mounted("mfsownmoved")?;
    let same = "import os, sys
file = os.open('/tmp/own/x', os.O_RDWR | os.O_CREAT)
print(os.getpid(), flush=True)
for name in map(str.strip, sys.stdin):
    there = os.open(name, os.O_RDWR)
    alike = os.path.sameopenfile(file, there), os.path.samestat(os.fstat(file), os.stat(name))
    os.close(there)
    print(*alike, flush=True)
";
    let python = ["-L", "/usr/bin/python3", "-c", same];
    let mut program = LineClient::start(cluster.command(1, "mosrun").args(python))?;
    let pid = program.reply()?.parse()?;
    for to in ["2", "home"] {
        for name in ["/mfs/1/tmp/own/x", "/tmp/own/x", "/mfs/home/tmp/own/x"] {
            let reply = program.request(name);
            ensure!(reply == "True True", "before the move to {to}: {name}: {reply}");
        }
        cluster.migrate(pid, to)?;
    }
    Ok(())
}

/// In the container of a placed command, `/` is another node's, and all files are in one tree.
#[test]
fn placed_command_knows_both_names() -> Result<()> {
    let cluster = mounted("mfsownplaced")?;
    cluster.run(1, &["sh", "-c", "echo kept > /tmp/own/x"])?;
    let command = "cp x /mfs/1/tmp/own/x; mv /mfs/1/tmp/own/x x; cat x; hostname";
    for node in ["1", "2"] {
        let output = said(&cluster, 1, &format!("cd /tmp/own && mexec -n {node} sh -c '{command}'"))?;
        ensure!(output.matches("are the same file").count() == 2, "node {node}: {output}");
        ensure!(output.contains("kept\n") && output.contains(&format!("node{node}\n")), "{output}");
    }
    Ok(())
}

#[test]
fn own_files_are_the_root_of_the_node_for_its_own_root_only() -> Result<()> {
    let cluster = mounted("mfsownroot")?;
    ensure!(said(&cluster, 1, "readlink /mfs/1 /mfs/0; ls -F /mfs | grep '^[12]'")? == "/\n1\n1@\n2/\n");
    ensure!(said(&cluster, 2, "readlink /mfs/2; ls -F /mfs | grep '^[12]'")? == "/\n1/\n2@\n");
    // The node's server is not needed, nor its consent.
    cluster.run(1, &["sh", "-c", "mosctl nomfs; echo kept > /tmp/own/x"])?;
    ensure!(said(&cluster, 1, "cat /mfs/1/tmp/own/x")? == "kept\n");
    ensure!(said(&cluster, 2, "cat /mfs/1/tmp/own/x")?.contains("Permission denied"));
    // In another root directory, `/` has other files.
    let other_root = "mount -t tmpfs root /mnt && cd /mnt && mkdir usr mfs tmp && ln -s usr/bin usr/lib usr/lib64 . && \
                      mount --bind /usr usr && mount --bind /mfs mfs && mount --bind /tmp tmp && \
                      exec chroot . sh -c 'cp /tmp/own/x /mfs/1/tmp/own/x; cp /tmp/own/x /mfs/2/tmp/x'";
    let refused = said(&cluster, 1, &format!("unshare -m sh -c {}", quoted(other_root)))?;
    ensure!(refused.matches("Permission denied").count() == 1, "{refused}");
    ensure!(said(&cluster, 1, "cat /tmp/own/x /mfs/2/tmp/x")? == "kept\nkept\n");
    Ok(())
}

/// The text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
